# make quickstart | check | test [P=layers] | test-all | lint | generated | format | install [EXTRAS=tpu] | constraints | clean
#
# .venv is made with the first Python >= 3.11 found (or PYTHON=/path/to/python3) and holds the versions of
# constraints.txt. uv installs them where it is on PATH, else pip.

VENV := .venv
BIN := $(VENV)/bin
EXTRAS :=
UV := $(shell command -v uv)
PIP := $(if $(UV),$(UV) pip,$(BIN)/python -m pip --disable-pip-version-check)
# Worker processes of the tests, each with 8 fake devices on few cores
WORKERS := 2
# What `make check` runs: the shape of the code, three updates of each family, and arithmetic that has worked examples
FAST := tests/zoo/test_golden_steps.py tests/test_structure.py tests/optim/test_optimizers.py tests/sharding \
	$(addprefix tests/layers/test_attention.py::test_reference_,is_the_definition with_a_window_and_a_cap_is_the_definition \
	with_a_prefix_is_the_definition) tests/layers/test_attention_mask.py \
	tests/layers/test_sequence_parallel.py::test_the_ring_gives_the_output_and_gradients_of_one_device \
	tests/layers/test_mixture.py::test_an_even_router_has_a_loss_of_one \
	tests/training/test_update.py::test_a_loss_that_is_not_finite_is_left_out_though_its_gradient_is_finite \
	tests/models/heads/test_vocabulary_loss.py::test_chunked_sums_and_gradients_are_the_plain_ones \
	$(addprefix tests/data/objectives/test_,causal.py masked.py prefix.py replaced.py spans.py text_to_text.py) \
	$(filter-out %_of_a_package.py,$(wildcard tests/config/test_*.py))
# Files of tests that a change in these parts of the package can break: make test P="layers data/packing"
P :=
CHOSEN = $(if $(P),$(or $(shell $(BIN)/python -m tests.affected $(P)),$(error P=$(P))))

.PHONY: quickstart check fast test test-all lint generated format install constraints clean

quickstart: $(VENV)/installed
	@echo "training a small T5 on the documentation that is installed here: about 3 minutes on 2 cores"
	$(BIN)/python -m pretrainax.main --config=configs/quickstart.py

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(PYTEST_ARGS) $(CHOSEN)

# What takes long too: every model, several processes, killed ones, stores, compilers of accelerators
test-all: $(VENV)/installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS) $(CHOSEN)

# Before each commit: a minute on two cores
check:
	+$(MAKE) --jobs=2 --output-sync=target --no-print-directory lint fast

fast: $(VENV)/installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" --quiet $(FAST)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# What follows from the code: run it after a change of the layout, of a config field or of the zoo
generated: $(VENV)/installed-test
	$(BIN)/python docs/packages.py
	$(BIN)/python docs/config.py
	$(BIN)/python docs/architectures.py
	$(BIN)/python -m pretrainax.zoo --markdown > docs/zoo.md

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/installed$(addprefix -,$(EXTRAS))

# .venv/installed, or with extras .venv/installed-test, .venv/installed-test,tpu
$(VENV)/install%: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): 1.2 GB on disk (more with extras), some minutes, by your network and disk"
	$(PIP) install $(if $(UV),--python $(BIN)/python) --quiet --constraint constraints.txt \
		--editable ".$(addprefix [,$(addsuffix ],$(patsubst ed-%,%,$(filter ed-%,$*))))"
	touch $@

$(BIN)/python:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python); do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then \
			echo "$(VENV): $$($$python --version)"; $$python -m venv $(VENV) && exit; rm -rf $(VENV); exit 1; \
		fi; \
	done; \
	echo "PretrainAX needs Python 3.11 or newer; found none as $(or $(PYTHON),python3 or python3.11 to python3.14)." \
		"Install one, or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1

# One set of versions for every Python and system: JAX 0.10 is the last for Python 3.11. Without torch's CUDA packages.
constraints:
	$(UV) pip compile setup.cfg --extra test --extra parity --extra filters --extra eval --extra wandb --extra mlflow --universal \
		--python-version 3.11 --upgrade --no-header --no-annotate --strip-extras \
		| grep -Ev '^(nvidia|cuda|triton)' > constraints.txt

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info

# make quickstart | check | test [P=layers] | test-all | lint | generated | site | format | install [EXTRAS=tpu] | constraints | clean
#
# The first Python >= 3.11 found (or PYTHON=/path/to/python3) creates .venv. uv, or pip if uv is not on PATH, installs the
# versions of constraints.txt.

VENV := .venv
BIN := $(VENV)/bin
EXTRAS :=
UV := $(shell command -v uv)
PIP := $(if $(UV),$(UV) pip,$(BIN)/python -m pip --disable-pip-version-check)
# Worker processes of the tests; each simulates 8 devices on few cores
WORKERS := 2
# The tests of `make check`: code structure, three updates of each family, and arithmetic with worked examples
FAST := tests/zoo/test_golden_steps.py tests/test_structure.py tests/optim/test_optimizers.py tests/sharding \
	$(addprefix tests/layers/test_attention.py::test_reference_,is_the_definition with_a_window_and_a_cap_is_the_definition \
	with_a_prefix_is_the_definition) tests/layers/test_attention_mask.py \
	tests/layers/test_sequence_parallel.py::test_the_ring_gives_the_output_and_gradients_of_one_device \
	tests/layers/test_mixture.py::test_an_even_router_has_a_loss_of_one \
	tests/training/test_update.py::test_a_loss_that_is_not_finite_is_left_out_though_its_gradient_is_finite \
	tests/models/heads/test_vocabulary_loss.py::test_chunked_sums_and_gradients_are_the_plain_ones \
	$(addprefix tests/data/objectives/test_,causal.py masked.py prefix.py replaced.py spans.py text_to_text.py) \
	$(filter-out %_of_a_package.py,$(wildcard tests/config/test_*.py))
# Limits the tests to files that a change in these parts of the package can break: make test P="layers data/packing"
P :=
CHOSEN = $(if $(P),$(or $(shell $(BIN)/python -m tests.affected $(P)),$(error P=$(P))))

.PHONY: quickstart check fast test test-all lint generated site format install constraints clean

quickstart: $(VENV)/installed
	@echo "training a small T5 on installed Python documentation: about 3 minutes on 2 cores"
	$(BIN)/python -m pretrainax.main --config=configs/quickstart.py

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(PYTEST_ARGS) $(CHOSEN)

# All tests, with the slow ones: every model, several processes, kills, object stores, accelerator compilers
test-all: $(VENV)/installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS) $(CHOSEN)

# Run before each commit; takes a minute on two cores
check:
	+$(MAKE) --jobs=2 --output-sync=target --no-print-directory lint fast

fast: $(VENV)/installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" --quiet $(FAST)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Generates pages from the code; run after a change of the layout, a config field or the zoo
generated: $(VENV)/installed-test
	$(BIN)/python docs/packages.py
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/architectures.py
	$(BIN)/python -m pretrainax.zoo --markdown > docs/zoo.md

# Builds the documentation in site/
site: $(VENV)/installed-test
	$(BIN)/python -m mkdocs build --strict

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/installed$(addprefix -,$(EXTRAS))

# Stamp files: .venv/installed, or with extras .venv/installed-test, .venv/installed-test,tpu
$(VENV)/install%: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): 0.9 GB on disk (more with extras), a few minutes"
	$(PIP) install $(if $(UV),--python $(BIN)/python) --quiet --constraint constraints.txt \
		--editable ".$(addprefix [,$(addsuffix ],$(patsubst ed-%,%,$(filter ed-%,$*))))"
	touch $@

$(BIN)/python:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python); do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then \
			echo "$(VENV): $$($$python --version)"; $$python -m venv $(VENV) && exit; rm -rf $(VENV); exit 1; \
		fi; \
	done; \
	echo "PretrainAX needs Python 3.11 or newer; not found as $(or $(PYTHON),python3 or python3.11 to python3.14)." \
		"Install it, or set its path: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1

# Pins one set of versions for all Pythons and systems, without torch's CUDA packages. JAX 0.10 is the last for Python
# 3.11.
constraints:
	$(UV) pip compile setup.cfg --extra test --extra parity --extra filters --extra eval --extra wandb --extra mlflow \
		--extra servers --universal --python-version 3.11 --upgrade --no-header --no-annotate --strip-extras \
		| grep -Ev '^(nvidia|cuda|triton)' > constraints.txt

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info

"""Tests that untrusted input ends with a result or one line, within budgets of time and memory, and on Ctrl-C."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from pretrainax.adapt import patterns
from pretrainax.config import UserError
from pretrainax.inference import constraints
from pretrainax.runtime.confined import Confined
from pretrainax.tokenization import ByteBPE, chat
from tests.support.runs import ROOT


@pytest.fixture
def functions(tmp_path):
    """Writes a file of functions that behave as libraries may on untrusted input."""
    file = tmp_path / "functions.py"
    file.write_text(
        textwrap.dedent(
            """
            import os, sys
            def double(x): return 2 * x
            def refuse(x): raise ValueError(f"is {x}, which is odd")
            def hang(x): return len(str(9 ** 9 ** 9))
            def grow(x): return len(bytearray(x))
            def recurse(x): return recurse(x)
            def crash(x): os.abort()
            def chatter(x): print("noise"); os.write(1, b"more"); return x
            def environment(x): return dict(os.environ)
            """
        )
    )
    return lambda name, seconds=1.0, gib=1.0: Confined(str(file), name, seconds, gib)


def test_a_result_comes_back_and_the_process_stays(functions):
    double = functions("double")
    assert double.call("x", x=21) == 42 and double.call("x", x="é\ud800") == "é\ud800" * 2
    process = double._process
    assert double.call("x", x=[1]) == [1, 1] and double._process is process
    double.close()
    assert double.call("x", x=1) == 2
    double.close()


@pytest.mark.first(3)
@pytest.mark.parametrize(
    "name, x, said",
    [
        ("refuse", 3, "the input is 3, which is odd"),
        ("hang", 0, r"the input took more than 1 s"),
        ("grow", 1 << 40, "the input took more than 1 GiB of memory"),
        ("grow", 3_000_000_000, "the input took more than 1 GiB of memory"),
        ("recurse", 0, "the input calls itself deeper"),
        ("crash", 0, r"the input took more than 1 GiB of memory, or crashed \(exit code -6\)"),
    ],
)
def test_what_fails_or_exceeds_a_budget_is_one_line_and_the_next_call_succeeds(name, x, said, functions):
    confined, began = functions(name), time.monotonic()
    for _ in range(2):
        with pytest.raises(UserError, match=said):
            confined.call("the input", x=x)
    assert time.monotonic() - began < 20
    confined.close()


def test_what_a_library_prints_is_no_result_and_the_environment_holds_no_secrets(functions, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    chatter, environment = functions("chatter"), functions("environment")
    assert [chatter.call("x", x=i) for i in range(3)] == [0, 1, 2]
    assert "hunter2" not in environment.call("x", x=0).values()
    chatter.close()
    environment.close()


def test_a_fork_has_a_process_of_its_own(functions):
    double = functions("double")
    assert double.call("x", x=1) == 2
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, str(double.call("x", x=2)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"4" and double.call("x", x=3) == 6
    double.close()


# --- regular expressions of generation --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return ByteBPE(vocab_size=265).build(iter(["Hello you and me"] * 30))


NASTY = [
    (r"(.|\n){0,500}x.{200}", "took more than"),
    (r"\p{L}{1,200}", "took more than|takes more than"),
    (r"((((a{100}){100}){100}){100})", "took more than"),
    (r"a{1,5000}", "takes more than 100,000 bytes"),
    ("(" * 100_000, "no text can match|deeper|crashed"),
]


@pytest.mark.slow
@pytest.mark.parametrize("pattern, said", NASTY)
def test_a_regular_expression_that_explodes_is_one_line(pattern, said, tokenizer, monkeypatch):
    pytest.importorskip("outlines_core", reason="outlines-core is not installed: pip install 'pretrainax[regex]'")
    monkeypatch.setattr(constraints, "_MAX_SECONDS", 3.0)
    monkeypatch.setattr(constraints, "_MAX_TABLE_BYTES", 100_000)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(UserError, match=said) as e:
        constraints.matching(
            pattern, tokenizer.spellings(), tokenizer.vocabulary.special_ids, 265, [tokenizer.vocabulary.separator]
        )
    assert "\n" not in str(e.value) and len(str(e.value)) < 700
    assert time.monotonic() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # The unit is KiB, for this process.


@pytest.mark.slow
def test_ctrl_c_ends_a_regular_expression_at_once():
    pytest.importorskip("outlines_core", reason="outlines-core is not installed: pip install 'pretrainax[regex]'")
    code = (
        "from pretrainax.inference import constraints\n"
        "from pretrainax.tokenization import ByteBPE\n"
        "t = ByteBPE(vocab_size=265).build(iter(['Hello you and me'] * 30))\n"
        "print('begins', flush=True)\n"
        "special, ends = t.vocabulary.special_ids, [t.vocabulary.separator]\n"
        r"constraints.matching(r'(.|\n){0,500}x.{200}', t.spellings(), special, 265, ends)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert b"KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert time.monotonic() - began < 5


# --- chat templates ---------------------------------------------------------------------------------------------------

TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "you"}]
ENDLESS = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "took more than 1 s",
    "{{ 'a' * 3000000000 }}": "GiB of memory",
    "{{ 9 ** (9 ** 9) }}": "took more than 1 s|GiB of memory",
    "{{ '%3000000000d' % 1 }}": "GiB of memory",
    "{{ 'a'.center(3000000000) }}": "GiB of memory",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}": "took more than",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "deeper than Python allows|fails|crashed",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "deeper than Python allows|valid Jinja|crashed",
    "{% if a %}" * 3000 + "{% endif %}" * 3000: "deeper than Python allows|valid Jinja|fails|crashed",
}


@pytest.fixture
def soon(monkeypatch):
    """Limits templates to one second."""
    confined = Confined(chat.chat_templates.__file__, "render", seconds=1, gib=1)
    monkeypatch.setattr(chat, "_renderer", lambda: confined)
    yield
    confined.close()


@pytest.mark.first(3)
@pytest.mark.parametrize("template", ENDLESS, ids=range(len(ENDLESS)))
def test_a_template_that_never_ends_is_one_line(template, tokenizer, soon):
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(UserError, match=ENDLESS[template]) as e:
        chat.Chat(template, tokenizer).encode(TALK)
    assert "\n" not in str(e.value) and time.monotonic() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize(
    "template, said",
    [
        ("{{ [1, 2, 3] | random }}", "No filter named 'random'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ joiner('x') }}", "address of an object"),
    ],
)
def test_a_template_renders_the_same_text_in_each_process(template, said, tokenizer):
    with pytest.raises(UserError, match=said):
        chat.Chat(template, tokenizer).encode(TALK)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ messages | attr('__class__') | attr('__mro__') }}",
    "{% set x = messages.append({'role': 'user', 'content': ''}) %}{{ x }}",
    "{% set x = messages[0].update({'content': ''}) %}{{ x }}",
    "{{ range.__self__ }}{{ dict.mro() }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_no_template_leaves_the_sandbox(template, tokenizer):
    """Tests that a forbidden access is an error or undefined; undefined values render as an empty string."""
    try:
        text, _ = chat.Chat("{% generation %}" + template + "{% endgeneration %}", tokenizer).render(TALK)
    except UserError as e:
        assert "SecurityError" in str(e) or "UndefinedError" in str(e) or "unsafe" in str(e)
    else:
        assert text == ""


# --- patterns of names ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(a|aa)+b", "(a|aa)" * 32])
def test_a_pattern_that_backtracks_is_one_line(pattern):
    began = time.monotonic()
    with pytest.raises(UserError, match="took more than 5 s"):
        patterns.match_patterns((f"^{pattern}!$",), ("a" * 48,))
    assert time.monotonic() - began < 15


def test_patterns_are_found_as_re_finds_them():
    names = ("encoder/query", "decoder/mlp/up", "decoder/key")
    assert patterns.match_patterns(("(?:^|/)(?:query|key)$", "mlp/.+$"), names) == [
        [True, False, True],
        [False, True, False],
    ]
    for wrong in ("(", "(*"):
        with pytest.raises((UserError, ValueError), match="is not a regular expression"):
            patterns.match_patterns((wrong,), names)

"""Shows what a model has learned at the end of a run: masks and spans it fills in, texts it continues.

The texts are the prompts of the config, which `prompted` asks about. Without any, `samples` picks some of the
validation split, and writes what the model says beside what stands there. `show_samples` prints them, for some seconds
at most.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pretrainax.config import UserError
from pretrainax.data.batch import Example, HostBatch, Lengths, has_prefix, is_encoder_decoder, is_gathered
from pretrainax.data.collate import collate
from pretrainax.data.pipeline import Batches, batches_of
from pretrainax.data.token_inputs import token_inputs, with_token_inputs
from pretrainax.inference.decoding import generate
from pretrainax.inference.fill import fill
from pretrainax.inference.holes import has_hole
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.request import Sampling
from pretrainax.models import AnyModel
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.param_paths import PyTree
from pretrainax.tokenization.base import Tokenizer
from pretrainax.training.callbacks import Callback
from pretrainax.training.run import Run

SECONDS = 5.0  # for all samples of a run, from when the model is compiled
_CANDIDATES = 32  # examples, evenly over the validation split
_SHOWN = 80  # tokens of a text, at most
_PROMPT = 64  # tokens that are continued where there is no prefix; as many follow
_TEMPERATURE = 0.8  # of continuations
_PROMPTED = f"text ⟶ filled in, or how the model goes on (a decoder's is drawn at temperature {_TEMPERATURE})"
_TRUTH = "[guess] where it is the text, [guess ≠ text] where it is not"

Stop = Callable[[bool], bool]  # told whether time is up, says whether to stop: the same in all processes


def show_samples(
    run: Run, params: PyTree, say: Callable[[str], None], is_leaving: Callable[[], bool] = lambda: False
) -> None:
    """Prints a few samples of the validation split by `say`, each as soon as it is there, and what their signs mean.

    Stops after `SECONDS`, or once `is_leaving` in any process; every process of the run calls it.
    """
    stopped = False
    if run.experiment.model.head is not None:  # it writes nothing
        return

    def stop(is_late: bool) -> bool:
        nonlocal stopped
        stopped = run.peers.agree(is_late or is_leaving())
        return stopped

    prompts, tokenizer = run.experiment.evaluate.prompts, run.prepared.tokenizer
    model, params = run.plain(params)
    if prompts and jax.process_count() > 1:
        say("config.evaluate.prompts are shown by runs of one process, and by python -m pretrainax.generate afterwards")
    if prompts and jax.process_count() == 1:
        say(f"samples of config.evaluate.prompts: {_PROMPTED}")
        loaded = LoadedModel(run.experiment, model, params, tokenizer, run.mesh, "this run")
        texts = prompted(loaded, prompts, stop)
    else:
        valid = batches_of(run.experiment, run.prepared, "valid")
        say(f"samples of the validation split, chosen for their words: {_legend(valid.template)}")
        texts = samples(model, params, _candidates(valid), valid.lengths, tokenizer, stop)
    for text in texts:
        say(f"  · {text}")
    if stopped:
        say(f"  (left out after {'a signal' if is_leaving() else f'{SECONDS:g} s'}: the others)")


class Samples(Callback):
    """Shows samples at the end of a run."""

    part, label = "finishing", "samples"

    def on_end(self, loop, state, metrics):
        shown: list[str] = []

        def show(line: str) -> None:
            loop.note(line)
            shown.append(line)

        show_samples(loop.run, loop.run.validated(state), show, lambda: loop.is_leaving)
        loop.text("samples", "\n".join(shown))


def prompted(loaded: LoadedModel, prompts: Sequence[str], stop: Stop = bool) -> Iterator[str]:
    """Yields what a model makes of each prompt, until `stop`; of one that it cannot read, why."""
    began = None  # when the first answer, for which the model is compiled, was there
    for prompt in prompts:
        if stop(began is not None and time.monotonic() - began > SECONDS):
            return
        try:
            made = _made_of(loaded, prompt)
        except UserError as e:
            made = f"nothing: {e}"
        began = began or time.monotonic()
        yield f"{_one_line(prompt)} ⟶ {_one_line(made)}"


def _made_of(loaded: LoadedModel, prompt: str) -> str:
    family = loaded.experiment.model.family
    if family == "encoder" or has_hole(loaded.tokenizer, prompt):
        return fill(loaded, prompt, top=1).text
    sampling = Sampling(max_new_tokens=_PROMPT, temperature=_TEMPERATURE if family == "decoder" else 0.0)
    return generate(loaded, [prompt], sampling)[0].text


def samples(
    model: AnyModel,
    params: PyTree,
    examples: Sequence[Example],
    lengths: Lengths,
    tokenizer: Tokenizer,
    stop: Stop = bool,
    count: int = 4,
) -> Iterator[str]:
    """Yields a text for each of `count` examples, until `stop`; the names of an example decide what is asked.

    Those with the most words are taken, and of them those where the model says words itself, right or wrong.

    Args:
      examples: not padded.
      lengths: what they are padded to, so that the model is compiled once.
    """
    words = _Words(tokenizer)
    asked = _Asked(model, params, lengths, words, stop)
    wordy = sorted(examples, key=words.share_of_letters, reverse=True)[: 2 * count]
    best = sorted(wordy, key=asked.share_of_words, reverse=True)[:count]
    asked.began = None  # the choice, and the compilation in it, do not count
    for example in best:
        if not asked.is_over() and (text := asked.about(example)):
            yield text


def _candidates(batches: Batches) -> list[Example]:
    """Returns the first example of some rows, evenly over the split."""
    rows = range(0, batches.rows_per_epoch, -(-batches.rows_per_epoch // _CANDIDATES))
    return [batches.examples(row)[1][0] for row in rows]


def _legend(example: Example) -> str:
    if is_gathered(example) or is_encoder_decoder(example):
        return _TRUTH
    return f"text ⟶ how the model goes on, drawn at temperature {_TEMPERATURE}"


# --- what is written -------------------------------------------------------------------------------------------------


class _Cell(NamedTuple):
    """A place of a text, with what the model says there."""

    guess: list[int]
    truth: list[int]
    is_asked: bool = True


class _Words:
    """Writes ids as text: whole words, on one line, without special pieces."""

    def __init__(self, tokenizer: Tokenizer):
        self.vocabulary, self.pieces = tokenizer.vocabulary, tokenizer.special_pieces
        self.spellings = tokenizer.spellings()
        self.begins, self.ends = tokenizer.word_edges
        self.tokenizer = tokenizer
        named = tokenizer.vocabulary
        self.shown_specials = {named.unk, *named.sentinels}

    def line(self, ids: Iterable[int]) -> str:
        """Returns a line; at a "¶" another text begins."""
        return _one_line(self._text(ids))

    def cells(self, cells: Sequence[_Cell]) -> str:
        """Returns a line of cells, each word that the model was asked about in brackets."""
        starts = [i for i in range(len(cells)) if i == 0 or self._is_edge(cells[i - 1].truth, cells[i].truth)]
        parts = []
        for start, end in itertools.pairwise([*starts, len(cells)]):
            word = cells[start:end]
            guess = self._text(i for cell in word for i in cell.guess)
            truth = self._text(i for cell in word for i in cell.truth)
            if not any(cell.is_asked for cell in word):
                parts.append(truth)
            else:
                space = " " * truth[:1].isspace()
                guess, truth = (_one_line(text) or ("⏎" if "\n" in text else "␣") for text in (guess, truth))
                parts.append(f"{space}[{guess}]" if guess == truth else f"{space}[{guess} ≠ {truth}]")
        return _one_line("".join(parts))

    def shown(self, tokens: np.ndarray) -> slice:
        """Returns which of the tokens [n] are shown: at most _SHOWN, and no part of a word at either end."""
        ids = tokens.tolist()
        edges = [i for i in range(1, len(ids)) if self._is_edge(ids[i - 1 : i], ids[i : i + 1])]
        start = 0 if self.begins[tokens[0]] else min(edges, default=0)
        end = len(tokens) if len(tokens) <= _SHOWN else max((i for i in edges if start < i <= _SHOWN), default=_SHOWN)
        return slice(start, end)

    def last_edge(self, ids: Sequence[int]) -> int:
        """Returns where the last word begins, of which the ids may be a part; their number where there is one word."""
        return max((i for i in range(1, len(ids)) if self._is_edge(ids[:i], ids[i:])), default=len(ids))

    def share_of_letters(self, example: Example) -> float:
        """Returns how much of what is shown of an example is letters, or spaces between words."""
        tokens = example["encoder_tokens" if is_encoder_decoder(example) else "tokens"]
        line = self.line(tokens[self.shown(tokens)].tolist())
        return sum(c.isalpha() or c == " " for c in line) / max(len(line), 1)

    def _text(self, ids: Iterable[int]) -> str:
        parts = []
        for is_special, run in itertools.groupby(ids, self.vocabulary.special_ids.__contains__):
            if is_special:
                parts += map(self._special, run)
            else:
                parts.append(b"".join(self.spellings[i] for i in run).decode("utf-8", "replace"))
        return "".join(parts)

    def _special(self, i: int) -> str:
        if i == self.vocabulary.separator:
            return " ¶ "
        return f" {self.pieces[i]} " if i in self.shown_specials else ""

    def _is_edge(self, before: Sequence[int], after: Sequence[int]) -> bool:
        """Tells if a word ends between two runs of ids."""
        return not before or not after or bool(self.ends[before[-1]] or self.begins[after[0]])


def _one_line(text: str) -> str:
    return " ".join(text.split()).strip("¶ ")


# --- what is asked ---------------------------------------------------------------------------------------------------


class _Asked:
    """A model that is asked about one example at a time, compiled once for all of them."""

    def __init__(self, model: AnyModel, params: PyTree, lengths: Lengths, words: _Words, stop: Stop):
        self.params, self.lengths, self.words, self.stop = params, lengths, words, stop
        self.began: Optional[float] = None  # when the first answer, for which the model is compiled, was there
        vocabulary = words.vocabulary
        rows = model.config.vocab_size  # more than the vocabulary has: the others say nothing
        self.is_text = np.isin(np.arange(rows), [*set(range(vocabulary.size)) - vocabulary.special_ids])  # [V]
        spelled = [spelling.decode("utf-8", "ignore") for spelling in words.spellings]
        self.has_letters = np.array([any(map(str.isalpha, text)) for text in spelled])

        @jax.jit
        def say(params, batch, places, allowed, heat):
            lm = model.apply({"params": params}, batch, deterministic=True).heads["lm"]
            logits = lm.replace(features=lm.features[:, places]).logits()  # [1, N, D] -> [1, K, D] -> [1, K, V]
            key = jax.random.fold_in(jax.random.key(batch["tokens"].sum()), places[0])  # another for each example
            noise = jax.random.gumbel(key, logits.shape)
            drawn = jnp.where(allowed[None, None], logits + heat * noise, -jnp.inf)  # from softmax(logits / heat)
            return constrain(jnp.argmax(drawn, axis=-1)[0], P())  # [K], whole in every process

        self._say, self._token_inputs = say, token_inputs(model.config, words.tokenizer)

    def is_over(self) -> bool:
        """Returns whether to stop: after SECONDS, or for a reason that `stop` has."""
        return self.stop(self.began is not None and time.monotonic() - self.began > SECONDS)

    def share_of_words(self, example: Example) -> float:
        """Returns how many of its guesses, each with the true text around it, are words: 0 where nobody asks."""
        if not (is_gathered(example) or is_encoder_decoder(example)) or self.is_over():
            return 0.0
        special = np.isin(example["targets"], list(self.words.vocabulary.special_ids))
        places = np.flatnonzero((example["loss_weights"] > 0) & ~special)[:_SHOWN]
        said = self._guesses(_batch(example, self.lengths), places.tolist(), self.is_text)
        return float(self.has_letters[said].mean()) if said else 0.0

    def about(self, example: Example) -> str:
        """Returns a line about an example; "" where it was stopped before."""
        if is_gathered(example):
            return self._masks(example)
        if not is_encoder_decoder(example):
            return self._continuation(example)
        has_spans = np.isin(example["targets"], self.words.vocabulary.sentinels).any()
        return self._spans(example) if has_spans else self._answer(example)

    def _masks(self, example: Example) -> str:
        """Fills in the masks."""
        shown = self.words.shown(example["tokens"])
        positions = example["masked_positions"]
        asked = (example["loss_weights"] > 0) & (positions >= shown.start) & (positions < shown.stop)
        guesses = self._guesses(_batch(example, self.lengths), np.flatnonzero(asked).tolist(), self.is_text)
        cells = [_Cell([token], [token], is_asked=False) for token in example["tokens"].tolist()]
        for place, target, guess in zip(positions[asked], example["targets"][asked].tolist(), guesses, strict=True):
            cells[place] = _Cell([guess], [target])
        return self.words.cells(cells[shown])

    def _spans(self, example: Example) -> str:
        """Fills in the spans that are shown, with as many tokens as were taken out.

        Left free, a small model says nothing but sentinels.
        """
        source, targets = example["encoder_tokens"], example["targets"].tolist()
        source = source[self.words.shown(source)].tolist()
        spans = _spans_of(targets, self.words.vocabulary.sentinels)
        places = [place for i in source for place in spans.get(i, ())][:_SHOWN]
        said = self._decode(example, [place + 1 for place in places], self.is_text)  # inputs are targets, one place on
        if len(said) < len(places):
            return ""
        guesses, cells = dict(zip(places, said, strict=True)), []
        for i in source:
            shown = [place for place in spans.get(i, ()) if place in guesses]
            asked = _Cell([guesses[place] for place in shown], [targets[place] for place in shown], bool(shown))
            cells.append(asked if i in spans else _Cell([i], [i], is_asked=False))
        return self.words.cells(cells)

    def _answer(self, example: Example) -> str:
        """Answers a source as the targets do, in no more tokens than they have."""
        source, targets, eos = example["encoder_tokens"], example["targets"][:-1], self.words.vocabulary.eos
        said = self._decode(example, range(1, len(targets) + 1)[:_SHOWN], self._allowing(eos))
        if len(said) < min(len(targets), _SHOWN):
            return ""
        cell = _Cell(_until(eos, said), _until(eos, targets[:_SHOWN].tolist()))
        cut = " …" if len(source) > _SHOWN else ""
        return f"{self.words.line(source[:_SHOWN].tolist())}{cut} ⟶ {self.words.cells([cell])}"

    def _continuation(self, example: Example) -> str:
        """Goes on after the first words of the longest text of a window, or after the prefix."""
        words, lengths = self.words, self.lengths
        if has_prefix(example):
            start = max(int((example["prefix_mask"] == 0).argmax()), 1)
        else:
            of_longest = example["segment_ids"] == np.bincount(example["segment_ids"]).argmax()
            example = {name: x[of_longest][: 2 * _PROMPT] if x.ndim else x for name, x in example.items()}
            lengths = Lengths(*(min(n, 2 * _PROMPT) for n in lengths))
            start = words.last_edge(example["tokens"][: len(example["tokens"]) // 2 + 1].tolist())
        tokens = example["tokens"]
        given = tokens[max(start - _SHOWN, 0) : start]
        allowed = self._allowing(
            words.vocabulary.separator, *(words.vocabulary.sentinels if has_prefix(example) else ())
        )
        places = range(start, len(tokens))[:_PROMPT]
        said = self._decode(example, places, allowed, lengths, _TEMPERATURE)
        ended = _until(words.vocabulary.separator, said)
        if len(ended) == len(said):  # perhaps within a word
            ended = ended[: words.last_edge(ended)]
        return f"{words.line(given[words.shown(given)].tolist())} ⟶ {words.line(ended)}" if ended else ""

    def _allowing(self, *ids: Optional[int]) -> np.ndarray:
        """Returns which ids may be said beside those of text, [V] bool."""
        allowed = self.is_text.copy()
        allowed[[i for i in ids if i is not None]] = True
        return allowed

    def _decode(
        self,
        example: Example,
        places: Sequence[int],
        allowed: np.ndarray,
        lengths: Optional[Lengths] = None,
        heat: float = 0.0,
    ) -> list[int]:
        """Returns what the decoder says at `places` of its input, one after the other: fewer where it was stopped.

        The whole stack runs again for each place: simple, and enough for a handful of short samples.

        Args:
          allowed: [V] bool, the ids that it may say.
          heat: the temperature that they are drawn at; 0: the best.
        """
        batch, said = _batch(example, lengths or self.lengths), []
        for place in places:  # what is not yet said is not seen: the stack is causal
            if self.is_over():
                break
            said += self._guesses(batch, [place - 1], allowed, heat)
            batch["tokens"][0, place] = said[-1]
        return said

    def _guesses(self, batch: HostBatch, places: list[int], allowed: np.ndarray, heat: float = 0.0) -> list[int]:
        """Returns what is said at places of the predictions, at most _SHOWN."""
        room = np.zeros(_SHOWN, np.int32)  # always as many, so that the model is compiled once
        room[: len(places)] = places
        said = np.asarray(self._say(self.params, with_token_inputs(batch, self._token_inputs), room, allowed, heat))
        self.began = self.began or time.monotonic()
        return said[: len(places)].tolist()


def _batch(example: Example, lengths: Lengths) -> dict[str, np.ndarray]:
    """Returns one row, padded, of which no loss is asked: a generator fills in and replaces nothing. Characters are
    made of its tokens once these are what is to be read."""
    batch = collate([[example]], lengths, pad=0)
    return {name: x for name, x in batch.items() if name not in ("loss_weights", "targets", "characters")}


def _spans_of(targets: list[int], sentinels: Sequence[int]) -> dict[int, range]:
    """Returns the places of the spans of `<X> for inviting <Y> last </s>`: {X: 1 to 2, Y: 4}; then comes the end."""
    starts = [place for place, i in enumerate(targets) if i in sentinels]
    ends = [*starts[1:], len(targets) - 1]
    return {targets[start]: range(start + 1, end) for start, end in zip(starts, ends, strict=True)}


def _until(end: Optional[int], ids: list[int]) -> list[int]:
    return ids[: ids.index(end)] if end in ids else ids

"""Prints samples of a model at the end of a run: filled masks or spans, answers, or continuations.

`prompted` uses the prompts of the config. Without prompts, `samples` picks the most confident predictions in examples
of the validation split, and compares them with the true tokens. `show_samples` prints the samples within a few seconds.
"""

import itertools
import re
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

SECONDS = 5.0  # time limit for all samples of a run, after the compilation
_CANDIDATES = 64  # number of examples, evenly spaced in the validation split
_SHOWN = 80  # maximum number of tokens per sample
_PROMPT = 64  # maximum tokens of a prompt cut from a document, and of a continuation
_TEMPERATURE = 0.8  # of continuations
_PROMPTED = f"prompt ⟶ filled prompt or continuation (decoders sample at temperature {_TEMPERATURE})"
_CONTEXT = 12  # number of words that are shown on each side of a predicted word or span
_TOP = 10  # the summary counts true tokens among this many most likely tokens
_CONFIDENT = (
    "the most confident words of the model in the validation split, one per row, each with its probability: [word] if "
    "correct, [word ≠ truth] if not, […]: other words to predict. A word sees the true words before it in its span"
)
_ANSWER = "samples of the validation split: source ⟶ [prediction] if correct, [prediction ≠ truth] if not"

Stop = Callable[[bool], bool]  # argument: the time is up. Result: stop now; the same in all processes


def show_samples(
    run: Run, params: PyTree, say: Callable[[str], None], is_stopping: Callable[[], bool] = lambda: False
) -> None:
    """Passes lines with a few samples to `say`, each as soon as it is ready, after a line that explains the notation.

    The samples stop after `SECONDS`, or when `is_stopping` returns True in any process. Every process of the run must
    call this function.
    """
    stopped = False
    if run.experiment.model.head is not None:  # a model with a task head predicts no tokens
        return

    def stop(is_late: bool) -> bool:
        nonlocal stopped
        stopped = run.peers.agree(is_late or is_stopping())
        return stopped

    prompts, tokenizer = run.experiment.evaluate.prompts, run.prepared.tokenizer
    model, params = run.plain(params)
    if prompts and jax.process_count() > 1:
        say("config.evaluate.prompts need a run of one process; use python -m pretrainax.generate after the run")
    if prompts and jax.process_count() == 1:
        say(f"samples of config.evaluate.prompts: {_PROMPTED}")
        loaded = LoadedModel(run.experiment, model, params, tokenizer, run.mesh, "this run")
        texts = prompted(loaded, prompts, stop)
    else:
        valid = batches_of(run.experiment, run.prepared, "valid")
        say(_legend(valid.template, tokenizer))
        texts = samples(model, params, _candidates(valid), valid.lengths, tokenizer, stop)
    for text in texts:
        say(f"  · {text}")
    if stopped:
        say(f"  (no more samples after {'a signal' if is_stopping() else f'{SECONDS:g} s'})")


class Samples(Callback):
    """Logs samples at the end of a run."""

    part, label = "finishing", "samples"

    def on_end(self, loop, state, metrics):
        shown: list[str] = []

        def show(line: str) -> None:
            loop.note(line)
            shown.append(line)

        show_samples(loop.run, loop.run.validated(state), show, lambda: loop.is_stopping)
        loop.log_text("samples", "\n".join(shown))


def prompted(loaded: LoadedModel, prompts: Sequence[str], stop: Stop = bool) -> Iterator[str]:
    """Yields a line per prompt: its continuation, answer or filled text, or why the prompt is invalid.

    stop: see `Stop`; no further line follows after it returns True.
    """
    began = None  # time of the first result; it includes the compilation
    for prompt in prompts:
        if stop(began is not None and time.monotonic() - began > SECONDS):
            return
        try:
            result = _result_of(loaded, prompt)
        except UserError as e:
            result = f"no result: {e}"
        began = began or time.monotonic()
        yield f"{_one_line(prompt)} ⟶ {_one_line(result)}"


def _result_of(loaded: LoadedModel, prompt: str) -> str:
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
    count: int = 6,
) -> Iterator[str]:
    """Yields lines to print: the most confident predictions of masked words, or answers, or continuations.

    Examples with masks or spans yield at most `count` lines, the most confident first, and then a summary of the ranks
    of all true tokens. Other examples yield one line each for the `count` examples with the most letters.

    Args:
      examples: without padding; all with masks, all with spans, all with answers, or all for continuation.
      lengths: lengths to which examples are padded, so that the model compiles only once.
      stop: see `Stop`; it ends the predictions, and lines about masks and spans that are predicted already follow.
      count: maximum number of samples.
    """
    words = _Words(tokenizer)
    predictor = _Predictor(model, params, lengths, words, stop)
    wordy = sorted(examples, key=words.share_of_letters, reverse=True)
    if not _has_gaps(examples[0], tokenizer):
        for example in wordy[:count]:
            if not predictor.is_over() and (text := predictor.line(example)):
                yield text
        return
    excerpts = []
    for example in wordy:
        if predictor.is_over():
            break
        excerpts.append(words.excerpt(predictor.filled(example)))
    for probability, text in sorted(excerpts, reverse=True)[:count]:
        if text:
            yield f"{probability:4.0%}  {text}"
    if predictor.ranks:
        ranks = np.array(predictor.ranks)
        yield (
            f"{len(ranks):,} predicted tokens in {len(excerpts)} rows: {(ranks == 1).mean():.0%} are correct; the true "
            f"token is among the {_TOP} most likely for {(ranks <= _TOP).mean():.0%}"
        )


def _candidates(batches: Batches) -> list[Example]:
    """Returns the first example of each of up to _CANDIDATES rows, evenly spaced in the split."""
    rows = range(0, batches.rows_per_epoch, -(-batches.rows_per_epoch // _CANDIDATES))
    return [batches.examples(row)[1][0] for row in rows]


def _has_gaps(example: Example, tokenizer: Tokenizer) -> bool:
    """Returns True if an example asks for masked tokens or spans, not for an answer or a continuation."""
    return is_gathered(example) or bool(np.isin(example["targets"], tokenizer.vocabulary.sentinels).any())


def _legend(example: Example, tokenizer: Tokenizer) -> str:
    if _has_gaps(example, tokenizer):
        return _CONFIDENT
    if is_encoder_decoder(example):
        return _ANSWER
    return f"samples of the validation split: text ⟶ continuation, sampled at temperature {_TEMPERATURE}"


# --- formatting ------------------------------------------------------------------------------------------------------


class _Cell(NamedTuple):
    """A position of a sequence, or several positions: its predicted and its true ids."""

    guess: list[int]
    truth: list[int]
    is_predicted: bool = True
    probability: float = 1.0  # of the prediction; for several tokens the lowest


class _Words:
    """Formats token ids as one line of whole words, without most special tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self.vocabulary, self.pieces = tokenizer.vocabulary, tokenizer.special_pieces
        self.spellings = tokenizer.spellings()
        self.begins, self.ends = tokenizer.word_edges
        self.tokenizer = tokenizer
        vocabulary = tokenizer.vocabulary
        self.shown_specials = {vocabulary.unk, *vocabulary.sentinels}

    def line(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids as one line; "¶" separates documents."""
        return _one_line(self._text(ids))

    def cells(self, cells: Sequence[_Cell]) -> str:
        """Returns the text of the cells as one line, with predicted words in brackets."""
        return _one_line("".join(map(self._word, self._grouped(cells))))

    def excerpt(self, cells: Sequence[_Cell]) -> tuple[float, str]:
        """Returns the probability of the most confident predicted word, and a line with its context.

        Only predictions of at least two characters, all letters, count as words. Without such a word, returns (0, "").
        """
        words = self._grouped(cells)
        confidence = {
            i: min(cell.probability for cell in word if cell.is_predicted)
            for i, word in enumerate(words)
            if any(cell.is_predicted for cell in word) and self._is_word(i for cell in word for i in cell.guess)
        }
        if not confidence:
            return 0.0, ""
        best = max(confidence, key=confidence.__getitem__)
        start = max(best - _CONTEXT, 0)
        parts = [self._word(word, i != best) for i, word in enumerate(words[start : best + _CONTEXT + 1], start)]
        return confidence[best], re.sub(r"(\[…\] ?)+(?=\[…\])", "", _one_line("".join(parts)))

    def _is_word(self, ids: Iterable[int]) -> bool:
        text = self._text(ids).strip()
        return text.isalpha() and len(text) > 1

    def _grouped(self, cells: Sequence[_Cell]) -> list[Sequence[_Cell]]:
        """Returns the cells grouped by word."""
        starts = [i for i in range(len(cells)) if i == 0 or self._is_edge(cells[i - 1].truth, cells[i].truth)]
        return [cells[start:end] for start, end in itertools.pairwise([*starts, len(cells)])]

    def _word(self, word: Sequence[_Cell], is_hidden: bool = False) -> str:
        """Returns the text of a word, in brackets if a part is predicted, then as […] with `is_hidden`."""
        guess = self._text(i for cell in word for i in cell.guess)
        truth = self._text(i for cell in word for i in cell.truth)
        if not any(cell.is_predicted for cell in word):
            return truth
        space = " " * truth[:1].isspace()
        if is_hidden:
            return f"{space}[…]"
        guess, truth = (_one_line(text) or ("⏎" if "\n" in text else "␣") for text in (guess, truth))
        return f"{space}[{guess}]" if guess == truth else f"{space}[{guess} ≠ {truth}]"

    def shown(self, tokens: np.ndarray) -> slice:
        """Returns the slice of the tokens [n] to display: at most _SHOWN tokens, whole words at both ends."""
        ids = tokens.tolist()
        edges = [i for i in range(1, len(ids)) if self._is_edge(ids[i - 1 : i], ids[i : i + 1])]
        start = 0 if self.begins[tokens[0]] else min(edges, default=0)
        end = len(tokens) if len(tokens) <= _SHOWN else max((i for i in edges if start < i <= _SHOWN), default=_SHOWN)
        return slice(start, end)

    def last_edge(self, ids: Sequence[int]) -> int:
        """Returns the index where the last word begins, which may be incomplete; len(ids) if there is only one word."""
        return max((i for i in range(1, len(ids)) if self._is_edge(ids[:i], ids[i:])), default=len(ids))

    def share_of_letters(self, example: Example) -> float:
        """Returns the share of letters and spaces in the displayed text of an example, by characters."""
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
        """Returns True if a word ends between two consecutive sequences of ids."""
        return not before or not after or bool(self.ends[before[-1]] or self.begins[after[0]])


def _one_line(text: str) -> str:
    return " ".join(text.split()).strip("¶ ")


# --- prediction ------------------------------------------------------------------------------------------------------


class _Predictions(NamedTuple):
    """Predictions at K positions."""

    ids: list[int]
    probabilities: list[float]  # of `ids`
    ranks: list[int]  # of the true ids among all ids by probability, from 1


class _Predictor:
    """Predicts tokens of one example at a time, with one compiled program for all examples."""

    def __init__(self, model: AnyModel, params: PyTree, lengths: Lengths, words: _Words, stop: Stop):
        self.params, self.lengths, self.words, self.stop = params, lengths, words, stop
        self.began: Optional[float] = None  # time of the first prediction; it includes the compilation
        vocabulary = words.vocabulary
        rows = model.config.vocab_size  # may exceed the size of the vocabulary; the excess rows belong to no token
        self.is_text = np.isin(np.arange(rows), [*set(range(vocabulary.size)) - vocabulary.special_ids])  # [V]
        self.ranks: list[int] = []  # of the true tokens in all displayed masks and spans

        @jax.jit
        def predict(params, batch, places, truths, allowed, temperature):
            lm = model.apply({"params": params}, batch, deterministic=True).heads["lm"]
            logits = lm.replace(features=lm.features[:, places]).logits()  # [1, N, D] -> [1, K, D] -> [1, K, V]
            key = jax.random.fold_in(jax.random.key(batch["tokens"].sum()), places[0])  # differs between examples
            noise = jax.random.gumbel(key, logits.shape)
            logits = jnp.where(allowed[None, None], logits, -jnp.inf)[0]  # [K, V]
            ids = jnp.argmax(logits + temperature * noise[0], axis=-1)  # from softmax(logits / temperature)
            true_logits = jnp.take_along_axis(logits, truths[:, None], axis=-1)
            ranks = 1 + jnp.sum(logits > true_logits, axis=-1)
            probabilities = jnp.take_along_axis(jax.nn.softmax(logits), ids[:, None], axis=-1)[:, 0]
            return tuple(constrain(x, P()) for x in (ids, probabilities, ranks))  # [K] each, on every device

        self._predict, self._token_inputs = predict, token_inputs(model.config, words.tokenizer)

    def is_over(self) -> bool:
        """Returns True if SECONDS have passed or if the run is stopping, in any process."""
        return self.stop(self.began is not None and time.monotonic() - self.began > SECONDS)

    def line(self, example: Example) -> str:
        """Returns a line with the predicted answer to an example, or with its continuation; "" after a stop."""
        return self._answer(example) if is_encoder_decoder(example) else self._continuation(example)

    def filled(self, example: Example) -> list[_Cell]:
        """Returns the cells of the displayed part of an example, with filled masks or spans.

        Each prediction reads the true context, not other predictions.
        """
        return self._masks(example) if is_gathered(example) else self._spans(example)

    def _masks(self, example: Example) -> list[_Cell]:
        shown = self.words.shown(example["tokens"])
        positions = example["masked_positions"]
        masked = (example["loss_weights"] > 0) & (positions >= shown.start) & (positions < shown.stop)
        places, targets = np.flatnonzero(masked).tolist(), example["targets"][masked]
        predicted = self._predictions(_batch(example, self.lengths), places, targets)
        self.ranks += predicted.ranks
        cells = [_Cell([token], [token], is_predicted=False) for token in example["tokens"].tolist()]
        for place, target, guess, probability in zip(
            positions[masked], targets.tolist(), predicted.ids, predicted.probabilities, strict=True
        ):
            cells[place] = _Cell([guess], [target], probability=probability)
        return cells[shown]

    def _spans(self, example: Example) -> list[_Cell]:
        """Returns the cells of the encoder input with filled spans.

        The prediction of a token sees the true earlier tokens of its span. Each span has its true number of tokens.
        Without this constraint, a small model predicts only sentinels.
        """
        source, targets = example["encoder_tokens"], example["targets"].tolist()
        source = source[self.words.shown(source)].tolist()
        spans = _spans_of(targets, self.words.vocabulary.sentinels)
        places = [place for i in source for place in spans.get(i, ())][:_SHOWN]
        predicted = self._predictions(_batch(example, self.lengths), places, example["targets"][places])
        self.ranks += predicted.ranks
        filled = {
            place: _Cell([i], [targets[place]], probability=p)
            for place, i, p in zip(places, predicted.ids, predicted.probabilities, strict=True)
        }
        cells = []
        for i in source:
            gap = [filled[place] for place in spans.get(i, ()) if place in filled]
            cells += gap if i in spans else [_Cell([i], [i], is_predicted=False)]
        return cells

    def _answer(self, example: Example) -> str:
        """Returns a line with the encoder input and its predicted target, cut to the length of the true target."""
        source, targets, eos = example["encoder_tokens"], example["targets"][:-1], self.words.vocabulary.eos
        predicted = self._decode(example, range(1, len(targets) + 1)[:_SHOWN], self._allowing(eos))
        if len(predicted) < min(len(targets), _SHOWN):
            return ""
        cell = _Cell(_until(eos, predicted), _until(eos, targets[:_SHOWN].tolist()))
        cut = " …" if len(source) > _SHOWN else ""
        return f"{self.words.line(source[:_SHOWN].tolist())}{cut} ⟶ {self.words.cells([cell])}"

    def _continuation(self, example: Example) -> str:
        """Returns a line with a prompt and its continuation.

        The prompt is the prefix of the example or, without a prefix, the first words of its longest document.
        """
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
        predicted = self._decode(example, places, allowed, lengths, _TEMPERATURE)
        ended = _until(words.vocabulary.separator, predicted)
        if len(ended) == len(predicted):  # the last word may be incomplete
            ended = ended[: words.last_edge(ended)]
        return f"{words.line(given[words.shown(given)].tolist())} ⟶ {words.line(ended)}" if ended else ""

    def _allowing(self, *ids: Optional[int]) -> np.ndarray:
        """Returns a mask [V] bool of allowed ids: the tokens that are not special, and `ids`; ignores None in `ids`."""
        allowed = self.is_text.copy()
        allowed[[i for i in ids if i is not None]] = True
        return allowed

    def _decode(
        self,
        example: Example,
        places: Sequence[int],
        allowed: np.ndarray,
        lengths: Optional[Lengths] = None,
        temperature: float = 0.0,
    ) -> list[int]:
        """Decodes ids at `places` of the decoder input, one after the other; returns fewer ids after a stop.

        The whole stack runs again for each position. This is simple, and fast enough for a few short samples.

        Args:
          allowed: [V] bool, mask of allowed ids.
          temperature: 0 selects the most likely id.
        """
        batch, predicted = _batch(example, lengths or self.lengths), []
        for place in places:  # the decoder is causal: inputs after `place` have no effect
            if self.is_over():
                break
            predicted += self._predictions(batch, [place - 1], [0], allowed, temperature).ids
            batch["tokens"][0, place] = predicted[-1]
        return predicted

    def _predictions(
        self,
        batch: HostBatch,
        places: Sequence[int],
        truths: Sequence[int] | np.ndarray,
        allowed: Optional[np.ndarray] = None,
        temperature: float = 0.0,
    ) -> _Predictions:
        """Returns the predictions at `places`.

        Args:
          places: positions of the decoder input, at most _SHOWN.
          truths: the true ids at `places`, to rank them.
          allowed: [V] bool, mask of allowed ids; None: the tokens that are not special.
        """
        padded = np.zeros((2, _SHOWN), np.int32)  # constant size, so that the model compiles only once
        padded[:, : len(places)] = places, truths
        batch, allowed = with_token_inputs(batch, self._token_inputs), self.is_text if allowed is None else allowed
        predicted = jax.device_get(self._predict(self.params, batch, *padded, allowed, temperature))
        self.began = self.began or time.monotonic()
        return _Predictions(*(x[: len(places)].tolist() for x in predicted))


def _batch(example: Example, lengths: Lengths) -> dict[str, np.ndarray]:
    """Returns a batch of one padded row, without the arrays of the loss.

    Without these arrays, ELECTRA's generator replaces no tokens. Decoding changes the tokens, so the characters are
    also left out: `with_token_inputs` recomputes them.
    """
    batch = collate([[example]], lengths, pad=0)
    return {name: x for name, x in batch.items() if name not in ("loss_weights", "targets", "characters")}


def _spans_of(targets: list[int], sentinels: Sequence[int]) -> dict[int, range]:
    """Returns the positions of the span after each sentinel; `<X> for inviting <Y> last </s>`: {X: 1 to 2, Y: 4}."""
    starts = [place for place, i in enumerate(targets) if i in sentinels]
    ends = [*starts[1:], len(targets) - 1]
    return {targets[start]: range(start + 1, end) for start, end in zip(starts, ends, strict=True)}


def _until(end: Optional[int], ids: list[int]) -> list[int]:
    return ids[: ids.index(end)] if end in ids else ids

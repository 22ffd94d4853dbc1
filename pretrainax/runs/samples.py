"""Shows samples from the model of a run: filled masks or spans, answers, or continuations.

`prompted` uses the config's prompts. Without prompts, `samples` selects the most confident predictions in validation
examples and shows them next to the true tokens. `show_samples` prints the samples within a few seconds.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
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
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.errors import counted
from pretrainax.inference.decoding import generate
from pretrainax.inference.fill import fill
from pretrainax.inference.holes import has_hole
from pretrainax.inference.inherited import ends_of_answers
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.request import Sampling
from pretrainax.models import AnyModel
from pretrainax.reporting.units import percent
from pretrainax.runs.current_model import current_model
from pretrainax.runs.run_reports import SAMPLES_FILE
from pretrainax.runs.sample_text import MAX_TOKENS, Cell, SampleText, one_line
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.param_paths import PyTree
from pretrainax.tokenization.base import Tokenizer
from pretrainax.training.callbacks import Callback
from pretrainax.training.run import Run

SECONDS = 5.0  # time limit for the samples of a validation, after the compilation
_CANDIDATES = 64  # number of examples, evenly spaced in the validation split
_PROMPT = 64  # maximum tokens of a prompt cut from a document, and of a continuation
_TEMPERATURE = 0.8  # sampling temperature of continuations
_PROMPTED = f"prompt ⟶ filled prompt or continuation (decoders sample at temperature {_TEMPERATURE})"
_TOP = 10  # the summary counts the true tokens that are among the _TOP most likely tokens
_CONFIDENT = (
    "the most confident words of the model in the validation split, one per row, each with its probability: [word] if "
    "correct, [word ≠ truth] if not, […]: other words to predict. A word sees the true words before it in its span"
)
_ANSWER = "samples of the validation split: source ⟶ [prediction] if correct, [prediction ≠ truth] if not"

Stop = Callable[[bool], bool]  # argument: the time limit has passed. Result: stop now; equal in all processes


def show_samples(
    run: Run, params: PyTree, say: Callable[[str], None], is_stopping: Callable[[], bool] = lambda: False
) -> None:
    """Passes a few samples to `say`, one line each, as soon as they are ready; the first line explains the notation.

    Sampling stops `SECONDS` seconds after the first prediction, or when `is_stopping` returns True in any process.
    Every process of the run must call this function.
    """
    stopped = False
    if run.experiment.model.head is not None:  # a model with a task head predicts no tokens
        return

    def stop(is_late: bool) -> bool:
        nonlocal stopped
        stopped = run.peers.agree(is_late or is_stopping())
        return stopped

    prompts, tokenizer = run.experiment.evaluate.prompts, run.prepared.tokenizer
    if prompts and jax.process_count() > 1:
        say("config.evaluate.prompts need a run of one process; use python -m pretrainax.generate after the run")
    if prompts and jax.process_count() == 1:
        loaded = current_model(run, params)
        groups = [(f"samples of config.evaluate.prompts: {_PROMPTED}", prompted(loaded, prompts, stop))]
    else:  # the training model: on large pods, experts need their capacity to compile
        model, params = run.plain(params)
        valid = batches_of(run.experiment, run.prepared, "valid")
        groups = [
            (_legend(examples[0], tokenizer), samples(model, params, examples, valid.lengths, tokenizer, stop))
            for examples in _candidates(valid, tokenizer)
        ]
    for legend, texts in groups:
        say(legend)
        for text in texts:
            say(f"  · {text}")
    if stopped:
        say(f"  (no more samples after {'a signal' if is_stopping() else f'{SECONDS:g} s'})")


class Samples(Callback):
    """Logs samples at the end of a run or, with `config.evaluate.samples`, after each validation.

    SAMPLES_FILE in the run's folder has the latest samples and their step.
    """

    part, label = "finishing", "samples"

    def on_evaluate(self, loop, state, metrics):
        if loop.run.experiment.evaluate.samples and loop.step < loop.run.experiment.train.steps:
            self.on_end(loop, state, metrics)

    def on_end(self, loop, state, metrics):
        lines: list[str] = []

        def log_line(line: str) -> None:
            loop.note(line)
            lines.append(line)

        show_samples(loop.run, loop.run.validated(state), log_line, lambda: loop.is_stopping)
        text = "\n".join(lines)
        loop.log_text("samples", text)
        if lines and loop.run.is_primary:
            write_atomically(os.path.join(loop.workdir, SAMPLES_FILE), f"step {loop.step:,}\n{text}\n")


def prompted(loaded: LoadedModel, prompts: Sequence[str], stop: Stop = bool) -> Iterator[str]:
    """Yields a line per prompt: its continuation, answer or filled text, or the reason why the prompt is invalid.

    Args:
      stop: see `Stop`; once it returns True, no more lines follow.
    """
    first_result_time = None  # time of the first result; it includes the compilation
    for prompt in prompts:
        if stop(first_result_time is not None and time.monotonic() - first_result_time > SECONDS):
            return
        try:
            result = _complete_prompt(loaded, prompt)
        except UserError as e:
            result = f"no result: {e}"
        first_result_time = first_result_time or time.monotonic()
        yield f"{one_line(prompt)} ⟶ {one_line(result)}"


def _complete_prompt(loaded: LoadedModel, prompt: str) -> str:
    family = loaded.experiment.model.family
    if family == "encoder" or has_hole(loaded.tokenizer, prompt):
        return fill(loaded, prompt, top=1).text
    temperature = _TEMPERATURE if family == "decoder" else 0.0
    sampling = Sampling(max_new_tokens=_PROMPT, temperature=temperature, stop=ends_of_answers(loaded))
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
    """Yields lines to print, which show the model's predictions of masks or spans, answers, or continuations.

    Examples with masks or spans yield at most `count` lines, the most confident first, and then a summary of the ranks
    of all true tokens. Other examples yield one line each for the `count` examples with the most letters.

    Args:
      examples: unpadded examples of one kind: with masks, with spans, with answers, or for continuation.
      lengths: lengths to which examples are padded, so that the model compiles only once.
      stop: see `Stop`; it ends prediction, but masks and spans that are already predicted are still printed.
      count: maximum number of samples.
    """
    words = SampleText(tokenizer)
    predictor = _Predictor(model, params, lengths, words, stop)
    by_letters = sorted(examples, key=words.fraction_of_letters, reverse=True)
    if not _has_gaps(examples[0], tokenizer):
        for example in by_letters[:count]:
            if not predictor.is_over() and (text := predictor.line(example)):
                yield text
        return
    excerpts = []
    for example in by_letters:
        if predictor.is_over():
            break
        excerpts.append(words.excerpt(predictor.fill(example)))
    for probability, text in sorted(excerpts, reverse=True)[:count]:
        if text:
            yield f"{probability:4.0%}  {text}"
    if predictor.ranks:
        ranks = np.array(predictor.ranks)
        yield (
            f"{counted(len(ranks), 'predicted token')} in {counted(len(excerpts), 'row')}: "
            f"{percent((ranks == 1).mean())} are correct; the true token is among the {_TOP} most likely for "
            f"{percent((ranks <= _TOP).mean())}"
        )


def _candidates(batches: Batches, tokenizer: Tokenizer) -> list[list[Example]]:
    """Returns the first examples of up to _CANDIDATES evenly spaced rows, in two groups: with and without gaps.

    Gaps are masks or spans. A mixture of objectives may have examples of both groups. Empty groups are omitted.
    """
    rows = range(0, batches.rows_per_epoch, -(-batches.rows_per_epoch // _CANDIDATES))
    by_kind: dict[bool, list[Example]] = {True: [], False: []}
    for example in (batches.examples(row)[1][0] for row in rows):
        by_kind[_has_gaps(example, tokenizer)].append(example)
    return [examples for examples in by_kind.values() if examples]


def _has_gaps(example: Example, tokenizer: Tokenizer) -> bool:
    """Returns True if the targets are masks or spans in the encoder input, rather than an answer or continuation."""
    has_spans = is_encoder_decoder(example) and np.isin(example["targets"], tokenizer.vocabulary.sentinels).any()
    return is_gathered(example) or bool(has_spans)


def _legend(example: Example, tokenizer: Tokenizer) -> str:
    if _has_gaps(example, tokenizer):
        return _CONFIDENT
    if is_encoder_decoder(example):
        return _ANSWER
    return f"samples of the validation split: text ⟶ continuation, sampled at temperature {_TEMPERATURE}"


class _Predictions(NamedTuple):
    """The predicted ids at K positions, their probabilities, and the ranks of the true ids."""

    ids: list[int]
    probabilities: list[float]  # probabilities of `ids`
    ranks: list[int]  # ranks of the true ids among all ids by probability, from 1


class _Predictor:
    """Predicts tokens of one example at a time, with one compiled program for all examples."""

    def __init__(self, model: AnyModel, params: PyTree, lengths: Lengths, words: SampleText, stop: Stop):
        self.params, self.lengths, self.words, self.stop = params, lengths, words, stop
        self.first_time: Optional[float] = None  # time of the first prediction; it includes the compilation
        vocabulary = words.vocabulary
        rows = model.config.vocab_size  # may exceed the size of the vocabulary; the excess rows belong to no token
        self.is_text = np.isin(np.arange(rows), [*set(range(vocabulary.size)) - vocabulary.special_ids])  # [V]
        self.ranks: list[int] = []  # ranks of the true tokens in all displayed masks and spans

        @jax.jit
        def predict(params, batch, positions, truths, allowed, temperature):
            lm = model.apply({"params": params}, batch, deterministic=True).heads["lm"]
            logits = lm.replace(features=lm.features[:, positions]).logits()  # [1, N, D] -> [1, K, D] -> [1, K, V]
            key = jax.random.fold_in(jax.random.key(batch["tokens"].sum()), positions[0])  # differs between examples
            noise = jax.random.gumbel(key, logits.shape)
            logits = jnp.where(allowed[None, None], logits, -jnp.inf)[0]  # [K, V]
            ids = jnp.argmax(logits + temperature * noise[0], axis=-1)  # from softmax(logits / temperature)
            true_logits = jnp.take_along_axis(logits, truths[:, None], axis=-1)
            ranks = 1 + jnp.sum(logits > true_logits, axis=-1)
            probabilities = jnp.take_along_axis(jax.nn.softmax(logits), ids[:, None], axis=-1)[:, 0]
            return tuple(constrain(x, P()) for x in (ids, probabilities, ranks))  # [K] each, on every device

        self._predict, self._token_inputs = predict, token_inputs(model.config, words.tokenizer)

    def is_over(self) -> bool:
        """Returns True if SECONDS seconds have passed since the first prediction, or `stop` ends sampling earlier."""
        return self.stop(self.first_time is not None and time.monotonic() - self.first_time > SECONDS)

    def line(self, example: Example) -> str:
        """Generates an example's answer or continuation as one line; returns "" if sampling must stop."""
        return self._answer(example) if is_encoder_decoder(example) else self._continuation(example)

    def fill(self, example: Example) -> list[Cell]:
        """Predicts the masks or spans among an example's displayed tokens; returns the cells to display.

        Each prediction is conditioned on the true context, not on other predictions.
        """
        return self._masks(example) if is_gathered(example) else self._spans(example)

    def _masks(self, example: Example) -> list[Cell]:
        """Predicts an example's masked tokens and returns one cell for each token to display."""
        displayed = self.words.displayed(example["tokens"])
        positions = example["masked_positions"]
        masked = (example["loss_weights"] > 0) & (positions >= displayed.start) & (positions < displayed.stop)
        indices, targets = np.flatnonzero(masked).tolist(), example["targets"][masked]
        predicted = self._predictions(_batch(example, self.lengths), indices, targets)
        self.ranks += predicted.ranks
        cells = [Cell([token], [token], is_predicted=False) for token in example["tokens"].tolist()]
        for position, target, guess, probability in zip(
            positions[masked], targets.tolist(), predicted.ids, predicted.probabilities, strict=True
        ):
            cells[position] = Cell([guess], [target], probability=probability)
        return cells[displayed]

    def _spans(self, example: Example) -> list[Cell]:
        """Predicts an example's spans and returns the cells for the encoder input.

        Each token's prediction is conditioned on the true earlier tokens of its span. Each span is predicted with its
        true number of tokens; without this constraint, a small model predicts only sentinels.
        """
        source, targets = example["encoder_tokens"], example["targets"].tolist()
        source = source[self.words.displayed(source)].tolist()
        spans = _spans_of(targets, self.words.vocabulary.sentinels)
        positions = [position for i in source for position in spans.get(i, ())][:MAX_TOKENS]
        predicted = self._predictions(_batch(example, self.lengths), positions, example["targets"][positions])
        self.ranks += predicted.ranks
        filled = {
            position: Cell([i], [targets[position]], probability=p)
            for position, i, p in zip(positions, predicted.ids, predicted.probabilities, strict=True)
        }
        cells = []
        for i in source:
            span_cells = [filled[position] for position in spans.get(i, ()) if position in filled]
            cells += span_cells if i in spans else [Cell([i], [i], is_predicted=False)]
        return cells

    def _answer(self, example: Example) -> str:
        """Predicts a target, up to the length of the true target; returns a line with input and prediction."""
        source, targets, eos = example["encoder_tokens"], example["targets"][:-1], self.words.vocabulary.eos
        predicted = self._decode(example, range(1, len(targets) + 1)[:MAX_TOKENS], self._allow(eos))
        if len(predicted) < min(len(targets), MAX_TOKENS):
            return ""
        cell = Cell(_cut_at(eos, predicted), _cut_at(eos, targets[:MAX_TOKENS].tolist()))
        cut = " …" if len(source) > MAX_TOKENS else ""
        return f"{self.words.line(source[:MAX_TOKENS].tolist())}{cut} ⟶ {self.words.cells([cell])}"

    def _continuation(self, example: Example) -> str:
        """Predicts the continuation of an example's prompt and returns a line that shows both.

        The prompt is the example's prefix or, without a prefix, the first words of its longest document.
        """
        words, lengths = self.words, self.lengths
        if has_prefix(example):
            start = max(int((example["prefix_mask"] == 0).argmax()), 1)
        else:
            is_longest = example["segment_ids"] == np.bincount(example["segment_ids"]).argmax()
            example = {name: x[is_longest][: 2 * _PROMPT] if x.ndim else x for name, x in example.items()}
            lengths = Lengths(*(min(n, 2 * _PROMPT) for n in lengths))
            start = words.last_edge(example["tokens"][: len(example["tokens"]) // 2 + 1].tolist())
        tokens = example["tokens"]
        prompt = tokens[max(start - MAX_TOKENS, 0) : start]
        allowed = self._allow(words.vocabulary.separator, *(words.vocabulary.sentinels if has_prefix(example) else ()))
        positions = range(start, len(tokens))[:_PROMPT]
        predicted = self._decode(example, positions, allowed, lengths, _TEMPERATURE)
        completed = _cut_at(words.vocabulary.separator, predicted)
        if len(completed) == len(predicted):  # the last word may be incomplete
            completed = completed[: words.last_edge(completed)]
        return f"{words.line(prompt[words.displayed(prompt)].tolist())} ⟶ {words.line(completed)}" if completed else ""

    def _allow(self, *ids: Optional[int]) -> np.ndarray:
        """Returns a bool mask [V] of the allowed token ids: all non-special tokens and `ids` (except None)."""
        allowed = self.is_text.copy()
        allowed[[i for i in ids if i is not None]] = True
        return allowed

    def _decode(
        self,
        example: Example,
        positions: Sequence[int],
        allowed: np.ndarray,
        lengths: Optional[Lengths] = None,
        temperature: float = 0.0,
    ) -> list[int]:
        """Decodes the ids at `positions` of the decoder input one by one; returns fewer ids if sampling must stop.

        The complete stack runs again for each position. This is simple, and fast enough for a few short samples.

        Args:
          allowed: bool mask [V] of the allowed ids.
          temperature: 0 selects the most likely id.
        """
        batch, predicted = _batch(example, lengths or self.lengths), []
        for position in positions:  # the decoder is causal: inputs after `position` have no effect
            if self.is_over():
                break
            predicted += self._predictions(batch, [position - 1], [0], allowed, temperature).ids
            batch["tokens"][0, position] = predicted[-1]
        return predicted

    def _predictions(
        self,
        batch: HostBatch,
        positions: Sequence[int],
        truths: Sequence[int] | np.ndarray,
        allowed: Optional[np.ndarray] = None,
        temperature: float = 0.0,
    ) -> _Predictions:
        """Predicts the token ids at `positions`, and computes the ranks of the true ids.

        Args:
          positions: positions of the decoder input, at most MAX_TOKENS.
          truths: the true token ids at `positions`.
          allowed: bool mask [V] of the allowed ids. If None, all non-special tokens are allowed.
        """
        padded = np.zeros((2, MAX_TOKENS), np.int32)  # constant size, so that the model compiles only once
        padded[:, : len(positions)] = positions, truths
        batch, allowed = with_token_inputs(batch, self._token_inputs), self.is_text if allowed is None else allowed
        predicted = jax.device_get(self._predict(self.params, batch, *padded, allowed, temperature))
        self.first_time = self.first_time or time.monotonic()
        return _Predictions(*(x[: len(positions)].tolist() for x in predicted))


def _batch(example: Example, lengths: Lengths) -> dict[str, np.ndarray]:
    """Builds a batch of one padded row, without the arrays needed only for the loss.

    Without these arrays, ELECTRA's generator replaces no tokens. The array of characters is also omitted, because
    decoding changes the tokens; `with_token_inputs` recomputes it.
    """
    batch = collate([[example]], lengths, pad=0)
    return {name: x for name, x in batch.items() if name not in ("loss_weights", "targets", "characters")}


def _spans_of(targets: list[int], sentinels: Sequence[int]) -> dict[int, range]:
    """Returns the positions of each sentinel's span, e.g. {X: 1 to 2, Y: 4} for `<X> for inviting <Y> last </s>`."""
    starts = [position for position, i in enumerate(targets) if i in sentinels]
    ends = [*starts[1:], len(targets) - 1]
    return {targets[start]: range(start + 1, end) for start, end in zip(starts, ends, strict=True)}


def _cut_at(end: Optional[int], ids: list[int]) -> list[int]:
    return ids[: ids.index(end)] if end in ids else ids

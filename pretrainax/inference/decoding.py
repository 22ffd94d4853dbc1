"""Generates text after prompts with a decoder or an encoder-decoder.

The device generates tokens in chunks. Between two chunks, the host searches for stop strings and streams new text. The
output for a prompt depends only on the prompt, its index and the options. It does not depend on the other prompts of
the batch or on the chunk size.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal, Optional

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example, is_encoder_decoder
from pretrainax.inference import beam_search, token_loop
from pretrainax.inference.cached import CachedModel
from pretrainax.inference.constraints import allowed_ids, matching, without_strings
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.prompts import batch_of, generation_limit, read_prompt, tokens_of
from pretrainax.inference.request import Sampling
from pretrainax.inference.rows import bucket
from pretrainax.inference.sampling import Rules, row_keys
from pretrainax.inference.stops import find_stop, settled, stopped_after
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.axes import BATCH_AXES
from pretrainax.sharding.param_paths import PyTree

Ended = Literal["eos", "stop", "length", "context"]
OnText = Callable[[int, str], None]  # called with the index of a prompt and the new text

_CHUNK = 64  # tokens per chunk
_CHUNK_WITH_STOPS = 16  # tokens per chunk with stop strings
_CHUNK_STREAMED = 4  # tokens per chunk when streaming
_CONTEXT = 8  # prompt ids decoded together with a generated text: its first word may continue a word of the prompt


@dataclasses.dataclass(frozen=True)
class Generated:
    """One generated text, with its ids and their log-probabilities."""

    prompt: int  # index of the prompt
    text: str  # without the prompt, the end token and the stop string
    ids: tuple[int, ...]  # all generated ids, including the end token or the stop string
    log_probs: tuple[float, ...]  # of each id, in nats, from the logits of the model before penalties, temperature etc.
    ended: Ended  # eos: end token; stop: stop string; length: max_new_tokens; context: maximum length of the model
    score: Optional[float] = None  # score in beam search; None: no beam search


@dataclasses.dataclass
class Rates:
    """Numbers of tokens and seconds of device time, for prefill and for decoding steps; `generate` adds to them."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0  # including compilation
    step_tokens: int = 0  # generated tokens of all sequences, except the first token of each sequence
    steps: int = 0
    step_seconds: float = 0.0


def generate(
    loaded: LoadedModel,
    prompts: Sequence[str],
    sampling: Sampling = Sampling(),  # noqa: B008  it is frozen
    on_text: Optional[OnText] = None,
    first: int = 0,
    batch_size: int = 16,
    rates: Optional[Rates] = None,
) -> list[Generated]:
    """Generates `sampling.num_return` sequences for each prompt, in the order of the prompts.

    With beam search, the sequences of a prompt are sorted by score, best first. Prompts may contain special tokens:
    "The <extra_id_0> walks".

    Args:
      on_text: called with the index of a prompt and each new piece of its text. It is not called for samples if
        `sampling.num_return` is above 1. With beam search, it is called once per prompt with the best sequence.
      first: index of the first prompt. Sampled texts depend on the index of their prompt.
      batch_size: number of prompts that are on the device at the same time.
      rates: device times are added to it; None: they are not returned.

    Raises:
      UserError: an option is out of range, a prompt is invalid or too long, or the model is an encoder.
    """
    sampling.check()
    if isinstance(prompts, str):
        raise UserError("prompts is one string, it must be a list of strings: write [text]")
    examples = []
    for number, prompt in enumerate(prompts):
        try:
            examples.append(read_prompt(prompt, loaded.experiment, loaded.tokenizer))
            generation_limit(examples[-1], loaded)
        except UserError as e:
            raise UserError(f"prompt {first + number + 1}: {e}" if len(prompts) > 1 else str(e)) from e
    return generate_examples(loaded, examples, sampling, on_text, first, batch_size, rates)


def generate_examples(
    loaded: LoadedModel,
    examples: Sequence[Example],
    sampling: Sampling,
    on_text: Optional[OnText] = None,
    first: int = 0,
    batch_size: int = 16,
    rates: Optional[Rates] = None,
) -> list[Generated]:
    """Generates text like `generate`, for prompts in the form of model inputs: examples without targets."""
    texts = []
    with jax.set_mesh(loaded.mesh):
        for start in range(0, len(examples), batch_size):
            job = _Job(loaded, examples[start : start + batch_size], sampling, first + start)
            texts += (job.search if sampling.num_beams > 1 else job.generate_examples)(on_text, rates or Rates())
    return texts


class Generator:
    """The jitted generation functions of a model. All checkpoints of a run share them."""

    def __init__(self, loaded: LoadedModel):
        stepper = CachedModel(loaded)

        def compiled(function: Callable[..., PyTree], *static: str, donated: str = "") -> Callable[..., PyTree]:
            return jax.jit(
                functools.partial(function, stepper), static_argnames=static, donate_argnames=donated or None
            )

        self.begin = compiled(token_loop.begin, "copies", "room")
        self.go_on = compiled(token_loop.go_on, donated="written")
        self.begin_search = compiled(beam_search.begin, "beams", "room")
        self.search_on = compiled(beam_search.go_on, donated="search")


def stepping_params(loaded: LoadedModel) -> PyTree:
    """Returns the parameters of a model in the layout that the functions of a `Generator` take."""
    return CachedModel(loaded).params


class _Job:
    """A batch of prompts on the device, with the options of the generation."""

    def __init__(self, loaded: LoadedModel, prompts: Sequence[Example], sampling: Sampling, first: int):
        self.loaded, self.prompts, self.sampling, self.first = loaded, prompts, sampling, first
        self.writer, self.params = loaded.cached_across_checkpoints(Generator), loaded.keep(stepping_params)
        vocabulary = loaded.tokenizer.vocabulary
        self.end = vocabulary.separator
        self.rules = rules_of(loaded, sampling)
        most = loaded.experiment.model.position.max_length
        limits = [min(sampling.max_new_tokens, generation_limit(p, loaded) or sampling.max_new_tokens) for p in prompts]
        self.room = bucket(max(limits))
        rows = -len(prompts) % math.prod(loaded.mesh.shape[axis] for axis in BATCH_AXES)  # extra rows for the devices
        self.limits = np.array(limits + [0] * rows, np.int32)
        batch = batch_of([*prompts, *[prompts[-1]] * rows], vocabulary.pad or 0, most)
        self.batch = put_batch(batch, loaded.mesh)

    def generate_examples(self, on_text: Optional[OnText], rates: Rates) -> list[Generated]:
        """Generates greedily or by sampling; streams text to `on_text` if there is one sequence per prompt."""
        sampling = self.sampling
        copies = sampling.num_return
        numbers = np.arange(len(self.limits) * copies)
        keys = row_keys(sampling.seed, self.first + numbers // copies, numbers % copies)
        limits = np.repeat(self.limits, copies)
        clock = _Clock(rates, sum(map(tokens_of, self.prompts)))
        params = self.params
        written: token_loop.GenerationState = self.writer.begin(
            params, self.batch, self.rules, keys, limits, copies=copies, room=self.room
        )
        texts = [
            _Text(self, row // copies, on_text if copies == 1 else None) for row in range(len(self.prompts) * copies)
        ]
        chunk = _CHUNK_STREAMED if on_text else _CHUNK_WITH_STOPS if sampling.stop else _CHUNK
        while True:
            count, tokens, log_probs, lengths, ended = jax.device_get(
                (written.count, written.tokens, written.log_probs, written.lengths, written.ended)
            )
            clock.tick(int(count), int(lengths[: len(texts)].sum()) - len(texts))
            for row, text in enumerate(texts):
                text.read(tokens[row, : lengths[row]].tolist(), bool(ended[row]))
            over = np.array([text.is_over for text in texts] + [True] * (len(limits) - len(texts)))
            if over.all():
                return [text.generated(log_probs[row], int(limits[row])) for row, text in enumerate(texts)]
            if (over != ended).any():  # some rows ended at a stop string, which the device does not detect
                written = written._replace(ended=jax.device_put(over, written.ended.sharding))
            if count == 1:
                written = clock.compiled(self.writer.go_on(params, written, self.rules, 0))
            written = self.writer.go_on(params, written, self.rules, chunk)

    def search(self, on_text: Optional[OnText], rates: Rates) -> list[Generated]:
        """Generates with beam search; passes the best text of each prompt to `on_text` after the search."""
        sampling = self.sampling
        clock = _Clock(rates, sum(map(tokens_of, self.prompts)))
        penalty, beams = sampling.length_penalty, sampling.num_beams
        params = self.params
        search: beam_search.Beams = self.writer.begin_search(
            params, self.batch, self.rules, penalty, self.limits, beams=beams, room=self.room
        )
        while True:
            count, ended = jax.device_get((search.count, search.ended))
            clock.tick(int(count), (int(count) - 1) * len(self.prompts))
            if ended.all():
                break
            if count == 1:
                search = clock.compiled(self.writer.search_on(params, search, self.rules, penalty, 0))
            search = self.writer.search_on(params, search, self.rules, penalty, _CHUNK)
        finished: beam_search.BeamSequences = jax.device_get(search.finished)
        texts = []
        for number in range(len(self.prompts)):
            for place in range(sampling.num_return):
                length = int(finished.lengths[number, place])
                if length == 0:
                    continue  # the constraints allow fewer sequences than num_return
                text = _Text(self, number, on_text if place == 0 else None)
                text.read(finished.tokens[number, place, :length].tolist(), True)
                score = float(finished.scores[number, place])
                texts.append(
                    text.generated(np.asarray(finished.log_probs[number, place]), int(self.limits[number]), score)
                )
        return texts


class _Text:
    """The state of one text during generation; detects stop strings and streams new characters."""

    def __init__(self, job: _Job, number: int, on_text: Optional[OnText]):
        self.job, self.number, self.on_text = job, job.first + number, on_text
        prompt = job.prompts[number]
        self.before = [] if is_encoder_decoder(prompt) else prompt["tokens"][-_CONTEXT:].tolist()
        self.ids: list[int] = []
        self.is_over, self.stopped, self._shown = False, False, 0

    def read(self, ids: list[int], is_over: bool) -> None:
        """Updates the text to the ids generated so far, and passes new characters to `on_text`.

        Args:
          ids: all ids of the text so far.
          is_over: True if the device has ended the text.
        """
        if self.is_over:
            return
        stops = self.job.sampling.stop
        if length := stopped_after(ids, len(self.ids), self._text_of, stops):
            ids, is_over, self.stopped = ids[:length], True, True
        self.ids, self.is_over = ids, is_over
        if self.on_text is not None:
            text = self.text if is_over else settled(self.text, stops)
            if new := text[self._shown :]:
                self.on_text(self.number, new)
                self._shown = len(text)

    @property
    def text(self) -> str:
        text = self._text_of(self.ids)
        return text[: find_stop(text, self.job.sampling.stop)] if self.stopped else text

    def _text_of(self, ids: Sequence[int]) -> str:
        """Decodes ids without the end token, as a continuation of the last ids of the prompt."""
        decode = self.job.loaded.tokenizer.decode
        ids = [i for i in ids if i != self.job.end]
        return decode([*self.before, *ids])[len(decode(self.before)) :]

    def generated(self, log_probs: np.ndarray, limit: int, score: Optional[float] = None) -> Generated:
        ended: Ended = "context" if limit < self.job.sampling.max_new_tokens else "length"
        if self.stopped:
            ended = "stop"
        elif self.ids and self.ids[-1] == self.job.end or len(self.ids) < limit:
            ended = "eos"
        of_ids = tuple(log_probs[: len(self.ids)].tolist())
        return Generated(self.number, self.text, tuple(self.ids), of_ids, ended, score)


class _Clock:
    """Adds the times between reads from the device to `Rates`. The first interval is the prefill."""

    def __init__(self, rates: Rates, prompt_tokens: int):
        rates.prompt_tokens += prompt_tokens
        self.rates, self.last, self.count, self.tokens = rates, time.perf_counter(), 0, 0

    def tick(self, count: int, tokens: int) -> None:
        """Records the end of a chunk in `Rates`.

        Args:
          count: number of tokens generated so far per row that has not ended.
          tokens: number of tokens generated so far in all rows, except the first token of each row.
        """
        now, rates = time.perf_counter(), self.rates
        if self.count == 0:
            rates.prefill_seconds += now - self.last
        else:
            rates.step_seconds += now - self.last
            rates.steps += count - self.count
            rates.step_tokens += tokens - self.tokens
        self.last, self.count, self.tokens = now, count, tokens

    def compiled(self, written: PyTree) -> PyTree:
        """Waits for a call that compiles a function and executes zero steps, and adds its time to the prefill.

        Args:
          written: result of the call.

        Returns:
          `written`.
        """
        written, now = jax.block_until_ready(written), time.perf_counter()
        self.rates.prefill_seconds += now - self.last
        self.last = now
        return written


def rules_of(loaded: LoadedModel, sampling: Sampling) -> Rules:
    """Returns the sampling options as arrays for the device; raises UserError for tokens outside the vocabulary."""
    tokenizer, rows = loaded.tokenizer, loaded.experiment.model.vocab_size
    automata = []
    if sampling.banned_strings or sampling.regex:
        described = tokenizer.spellings(), tokenizer.vocabulary, rows
        if sampling.banned_strings:
            automata.append(without_strings(sampling.banned_strings, *described))
        if sampling.regex:
            automata.append(matching(sampling.regex, *described))
    end = tokenizer.vocabulary.separator
    return Rules(
        allowed=jnp.asarray(allowed_ids(sampling.allowed_tokens, sampling.banned_tokens, tokenizer, rows)),
        end=-1 if end is None else end,
        automata=tuple(automata),
        temperature=sampling.temperature or None,
        **{name: getattr(sampling, name) for name in _OPTIONS},
    )


_OPTIONS = (
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("top_k", "top_p", "min_p", "typical_p"),
)

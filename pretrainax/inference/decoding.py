"""Lets a decoder or an encoder-decoder write: prompts in, texts out.

The host looks at what is written between pieces of the device's loop: where a string stops a text, and for those who
watch. What is written follows from the prompt and its number alone, not from the batch, or from how long pieces are.
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
from pretrainax.inference.prompts import batch_of, read_prompt, room_after, tokens_of
from pretrainax.inference.request import Sampling
from pretrainax.inference.rows import bucket
from pretrainax.inference.sampling import Rules, row_keys
from pretrainax.inference.stops import find_stop, settled, stopped_after
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.axes import BATCH_AXES
from pretrainax.sharding.param_paths import PyTree

Ended = Literal["eos", "stop", "length", "context"]
OnText = Callable[[int, str], None]  # told the number of a prompt, and what text of it is new

_PIECE = 64  # tokens between two looks of the host
_STOPPING = 16  # where strings may stop a text
_SHOWN = 4  # where somebody watches
_CONTEXT = 8  # ids of the prompt before a text, that say how its first word is written


@dataclasses.dataclass(frozen=True)
class Generated:
    """Holds one text that was generated."""

    prompt: int  # the number of its prompt
    text: str  # without the prompt, the end of the text, and what stopped it
    ids: tuple[int, ...]  # all that was written, with the end of the text or the stop
    log_probs: tuple[float, ...]  # of each id, in nats: what the model itself gives it, whatever the options
    ended: Ended  # eos: the end of a text; stop: a string; length: max_new_tokens; context: no more room in the model
    score: Optional[float] = None  # of beam search: by which the texts of a prompt are in order


@dataclasses.dataclass
class Rates:
    """Adds up how long the device took, for reading prompts and for the steps after that."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0  # compilation included
    step_tokens: int = 0  # tokens of all texts, without the first of each
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
    """Returns the texts that a model writes after prompts: `sampling.num_return` of each, best first, prompt by prompt.

    Special pieces in a prompt are understood: "The <extra_id_0> walks".

    Args:
      on_text: told of each piece of text when it is there; where a prompt has several texts, of none.
      first: the number of the first prompt, from which random numbers follow.
      batch_size: prompts that are on the device at a time.
      rates: the times of the device are added to it.

    Raises:
      UserError: an option out of range, a prompt that the model cannot read or that is too long for it, an encoder.
    """
    sampling.check()
    if isinstance(prompts, str):
        raise UserError("prompts is one text, it must be a list of them: write [text]")
    examples = []
    for number, prompt in enumerate(prompts):
        try:
            examples.append(read_prompt(prompt, loaded.experiment, loaded.tokenizer))
            room_after(examples[-1], loaded)
        except UserError as e:
            raise UserError(f"prompt {first + number + 1}: {e}" if len(prompts) > 1 else str(e)) from e
    return write(loaded, examples, sampling, on_text, first, batch_size, rates)


def write(
    loaded: LoadedModel,
    examples: Sequence[Example],
    sampling: Sampling,
    on_text: Optional[OnText] = None,
    first: int = 0,
    batch_size: int = 16,
    rates: Optional[Rates] = None,
) -> list[Generated]:
    """Returns what `generate` does, after prompts that are examples without predictions, as the model reads them."""
    texts = []
    with jax.set_mesh(loaded.mesh):
        for start in range(0, len(examples), batch_size):
            job = _Job(loaded, examples[start : start + batch_size], sampling, first + start)
            texts += (job.search if sampling.num_beams > 1 else job.write)(on_text, rates or Rates())
    return texts


class Writer:
    """Holds what is compiled for a model that writes: made once for all checkpoints of a run."""

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
    """Returns the parameters as the functions of a `Writer` take them."""
    return CachedModel(loaded).params


class _Job:
    """Holds a batch of prompts and what is asked for, as the device takes it."""

    def __init__(self, loaded: LoadedModel, prompts: Sequence[Example], sampling: Sampling, first: int):
        self.loaded, self.prompts, self.sampling, self.first = loaded, prompts, sampling, first
        self.writer, self.params = loaded.keep_compiled(Writer), loaded.keep(stepping_params)
        vocabulary = loaded.tokenizer.vocabulary
        self.end = vocabulary.separator
        self.rules = rules_of(loaded, sampling)
        most = loaded.experiment.model.position.max_length
        limits = [min(sampling.max_new_tokens, room_after(p, loaded) or sampling.max_new_tokens) for p in prompts]
        self.room = bucket(max(limits))
        rows = -len(prompts) % math.prod(loaded.mesh.shape[axis] for axis in BATCH_AXES)  # that fill up the devices
        self.limits = np.array(limits + [0] * rows, np.int32)
        batch = batch_of([*prompts, *[prompts[-1]] * rows], vocabulary.pad or 0, most)
        self.batch = put_batch(batch, loaded.mesh)

    def write(self, on_text: Optional[OnText], rates: Rates) -> list[Generated]:
        """Writes row by row: greedy, or drawn."""
        sampling = self.sampling
        copies = sampling.num_return
        numbers = np.arange(len(self.limits) * copies)
        keys = row_keys(sampling.seed, self.first + numbers // copies, numbers % copies)
        limits = np.repeat(self.limits, copies)
        clock = _Clock(rates, sum(map(tokens_of, self.prompts)))
        params = self.params
        written: token_loop.Written = self.writer.begin(
            params, self.batch, self.rules, keys, limits, copies=copies, room=self.room
        )
        texts = [
            _Text(self, row // copies, on_text if copies == 1 else None) for row in range(len(self.prompts) * copies)
        ]
        piece = _SHOWN if on_text else _STOPPING if sampling.stop else _PIECE
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
            if (over != ended).any():  # a string has stopped some
                written = written._replace(ended=jax.device_put(over, written.ended.sharding))
            if count == 1:
                written = clock.compiled(self.writer.go_on(params, written, self.rules, 0))
            written = self.writer.go_on(params, written, self.rules, piece)

    def search(self, on_text: Optional[OnText], rates: Rates) -> list[Generated]:
        """Searches with beams; what is found is there at the end."""
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
            search = self.writer.search_on(params, search, self.rules, penalty, _PIECE)
        found: beam_search.Texts = jax.device_get(search.finished)
        texts = []
        for number in range(len(self.prompts)):
            for place in range(sampling.num_return):
                length = int(found.lengths[number, place])
                if length == 0:
                    continue  # fewer texts than were asked for are allowed
                text = _Text(self, number, on_text if place == 0 else None)
                text.read(found.tokens[number, place, :length].tolist(), True)
                score = float(found.scores[number, place])
                texts.append(
                    text.generated(np.asarray(found.log_probs[number, place]), int(self.limits[number]), score)
                )
        return texts


class _Text:
    """Follows one text while it is written: where it stops, and what of it has been shown."""

    def __init__(self, job: _Job, number: int, on_text: Optional[OnText]):
        self.job, self.number, self.on_text = job, job.first + number, on_text
        prompt = job.prompts[number]
        self.before = [] if is_encoder_decoder(prompt) else prompt["tokens"][-_CONTEXT:].tolist()
        self.ids: list[int] = []
        self.is_over, self.stopped, self._shown = False, False, 0

    def read(self, ids: list[int], is_over: bool) -> None:
        """Takes note of all ids so far, and shows what is new."""
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
        """Returns ids as text, without the end: as they are written after the prompt, where there is one."""
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
    """Adds the times between looks at the device to `Rates`: the first is the prefill's."""

    def __init__(self, rates: Rates, prompt_tokens: int):
        rates.prompt_tokens += prompt_tokens
        self.rates, self.last, self.count, self.tokens = rates, time.perf_counter(), 0, 0

    def tick(self, count: int, tokens: int) -> None:
        """Takes note that rows have written `count` tokens each, and `tokens` in all behind their first."""
        now, rates = time.perf_counter(), self.rates
        if self.count == 0:
            rates.prefill_seconds += now - self.last
        else:
            rates.step_seconds += now - self.last
            rates.steps += count - self.count
            rates.step_tokens += tokens - self.tokens
        self.last, self.count, self.tokens = now, count, tokens

    def compiled(self, written: PyTree) -> PyTree:
        """Returns what a call of no steps gave, whose time is that of compiling: it belongs to the start."""
        written, now = jax.block_until_ready(written), time.perf_counter()
        self.rates.prefill_seconds += now - self.last
        self.last = now
        return written


def rules_of(loaded: LoadedModel, sampling: Sampling) -> Rules:
    """Returns the options as the device takes them; UserError for tokens that there are not."""
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

"""Generates text after prompts with a decoder or an encoder-decoder.

The device generates tokens in chunks. Between two chunks, the host searches for stop strings and streams new text. The
generated text depends only on the prompt, the index of the prompt and the options. It does not depend on other prompts
in the batch or on the chunk size.
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
from pretrainax.inference.constraints import allowed_ids, mask_of, matching, stopping, without_strings
from pretrainax.inference.framing import checked_texts
from pretrainax.inference.inherited import request_of
from pretrainax.inference.loaded import LoadedModel, check_language_model
from pretrainax.inference.prompts import batch_of, generation_limit, read_prompt, tokens_of
from pretrainax.inference.request import SAMPLING_ONLY, Sampling
from pretrainax.inference.rows import bucket
from pretrainax.inference.sampling import Rules, row_keys
from pretrainax.inference.stops import find_stop, settled, stopped_after
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.axes import BATCH_AXES
from pretrainax.sharding.param_paths import PyTree

Ended = Literal["eos", "stop", "length", "context", "blocked"]
OnText = Callable[[int, str], None]  # called with the index of a prompt and the new text

_CHUNK = 64  # tokens per chunk
_CHUNK_WITH_STOPS = 16  # tokens per chunk with stop strings
_CHUNK_STREAMED = 4  # tokens per chunk when streaming
# Number of prompt ids to decode together with generated ids, because the first token may continue a word of the prompt.
_CONTEXT = 8


@dataclasses.dataclass(frozen=True)
class Generated:
    """A generated text, with its token ids and their log-probabilities."""

    prompt: int  # index of the prompt
    text: str  # without the prompt, the end token, the stop string and, in an encoder-decoder, <s> or [CLS] … [SEP]
    ids: tuple[int, ...]  # all generated ids, including the end token or the stop string
    log_probs: tuple[float, ...]  # log-probability of each id in nats, from the unprocessed logits of the model
    # eos: end token; stop: stop string; length: max_new_tokens; context: maximum length of the model; blocked: the
    # options allowed no further token or, in beam search, no text
    ended: Ended
    score: Optional[float] = None  # score in beam search; None: no beam search, or no text


@dataclasses.dataclass
class Rates:
    """Token counts, and device time in seconds, of prefill and of decoding steps, accumulated by `generate`."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0  # including compilation
    step_tokens: int = 0  # generated tokens of all sequences, except the first token of each sequence
    steps: int = 0
    step_seconds: float = 0.0


def generate(
    loaded: LoadedModel,
    prompts: Sequence[str],
    sampling: Optional[Sampling] = None,
    on_text: Optional[OnText] = None,
    first: int = 0,
    batch_size: int = 16,
    rates: Optional[Rates] = None,
) -> list[Generated]:
    """Generates `sampling.num_return` sequences for each prompt; returns them in the order of the prompts.

    With beam search, the sequences of a prompt are sorted by score, best first. Prompts may contain special tokens, as
    in "The <extra_id_0> walks".

    Args:
      sampling: all options. If None, they are the settings of the model's generation_config.json (`request_of`).
      on_text: called with the index of a prompt and the new characters of its generated text. With beam search, it is
        called once per prompt, with the best sequence. It is not called if there are several samples per prompt.
      first: index of the first prompt. A sampled text depends on the index of its prompt.
      batch_size: number of prompts that are on the device at the same time.
      rates: token counts and device times; this call adds its counts and times. If None, nothing is measured.

    Raises:
      UserError: an option is out of range, a prompt is invalid or too long, or the model is an encoder.
    """
    sampling = request_of(loaded, {}).sampling if sampling is None else sampling
    sampling.check()
    prompts = checked_texts(prompts, "prompts")
    check_language_model(loaded)
    examples = []
    for number, prompt in enumerate(prompts):
        try:
            examples.append(read_prompt(prompt, loaded.experiment, loaded.tokenizer))
            generation_limit(examples[-1], loaded)
            _max_new_tokens(examples[-1], sampling)
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
    limits: Optional[Sequence[int]] = None,
) -> list[Generated]:
    """Generates text as in `generate`, for prompts that are already converted to examples without targets.

    Args:
      limits: maximum number of generated tokens for each prompt. If None, `sampling` sets it.
    """
    results = []
    limits = [_max_new_tokens(prompt, sampling) for prompt in examples] if limits is None else limits
    with jax.set_mesh(loaded.mesh):
        for start in range(0, len(examples), batch_size):
            part = slice(start, start + batch_size)
            job = _Job(loaded, examples[part], sampling, first + start, limits[part])
            results += (job.search if sampling.num_beams > 1 else job.generate_examples)(on_text, rates or Rates())
    return results


class Generator:
    """The jitted generation functions of a model, which all checkpoints of a run share."""

    def __init__(self, loaded: LoadedModel):
        stepper = CachedModel(loaded)

        def jit_with_stepper(function: Callable[..., PyTree], *static: str, donated: str = "") -> Callable[..., PyTree]:
            return jax.jit(
                functools.partial(function, stepper), static_argnames=static, donate_argnames=donated or None
            )

        self.begin = jit_with_stepper(token_loop.begin, "copies", "room")
        self.generate_chunk = jit_with_stepper(token_loop.generate_chunk, donated="written")
        self.begin_search = jit_with_stepper(beam_search.begin, "beams", "room")
        self.search_on = jit_with_stepper(beam_search.generate_chunk, donated="search")


def stepping_params(loaded: LoadedModel) -> PyTree:
    """Returns the parameters of a model in the layout that the functions of `Generator` expect."""
    return CachedModel(loaded).params


class _Job:
    """Generates text for one batch of prompts on the device."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[Example],
        sampling: Sampling,
        first: int,
        max_lengths: Sequence[int],
    ):
        self.loaded, self.prompts, self.sampling, self.first = loaded, prompts, sampling, first
        self.generator, self.params = loaded.cached_across_checkpoints(Generator), loaded.keep(stepping_params)
        vocabulary = loaded.tokenizer.vocabulary
        self.ends = loaded.end_tokens
        is_two_stacks = loaded.experiment.model.family == "encoder_decoder"
        # Special ids around the target of an encoder-decoder, for example <s> in BART.
        self.around = {vocabulary.bos, vocabulary.cls, vocabulary.sep} if is_two_stacks else set()
        self.rules = rules_of(loaded, sampling)
        max_length = loaded.experiment.model.position.max_length
        self.max_lengths = max_lengths  # maximum number of generated tokens for each prompt
        limits = [min(n, generation_limit(p, loaded) or n) for p, n in zip(prompts, max_lengths, strict=True)]
        self.capacity = bucket(max(limits))
        # Extra rows, so that the devices divide the number of rows.
        num_extra_rows = -len(prompts) % math.prod(loaded.mesh.shape[axis] for axis in BATCH_AXES)
        self.limits = np.array(limits + [0] * num_extra_rows, np.int32)
        batch = batch_of([*prompts, *[prompts[-1]] * num_extra_rows], vocabulary.pad or 0, max_length)
        self.batch = put_batch(batch, loaded.mesh)

    def generate_examples(self, on_text: Optional[OnText], rates: Rates) -> list[Generated]:
        """Generates with greedy decoding or sampling; streams text to `on_text` if there is one sequence per prompt."""
        sampling = self.sampling
        copies = sampling.num_return
        sequence_indices = np.arange(len(self.limits) * copies)
        keys = row_keys(sampling.seed, self.first + sequence_indices // copies, sequence_indices % copies)
        limits = np.repeat(self.limits, copies)
        clock = _Clock(rates, sum(map(tokens_of, self.prompts)))
        params = self.params
        generation: token_loop.GenerationState = self.generator.begin(
            params, self.batch, self.rules, keys, limits, copies=copies, room=self.capacity
        )
        texts = [
            _Text(self, row // copies, on_text if copies == 1 else None) for row in range(len(self.prompts) * copies)
        ]
        chunk = _CHUNK_STREAMED if on_text else _CHUNK_WITH_STOPS if sampling.stop else _CHUNK
        while True:
            count, tokens, log_probs, lengths, ended = jax.device_get(
                (generation.count, generation.tokens, generation.log_probs, generation.lengths, generation.ended)
            )
            self.loaded.progress()
            clock.tick(int(count), int(lengths[: len(texts)].sum()) - len(texts))
            for row, text in enumerate(texts):
                text.read(tokens[row, : lengths[row]].tolist(), bool(ended[row]))
            finished = np.array([text.is_finished for text in texts] + [True] * (len(limits) - len(texts)))
            if finished.all():
                return [text.generated(log_probs[row], int(limits[row])) for row, text in enumerate(texts)]
            if (finished != ended).any():  # some rows ended at a stop string, which the device does not detect
                generation = generation._replace(ended=jax.device_put(finished, generation.ended.sharding))
            if count == 1:
                generation = clock.wait_for_compilation(
                    self.generator.generate_chunk(params, generation, self.rules, 0)
                )
            generation = self.generator.generate_chunk(params, generation, self.rules, chunk)

    def search(self, on_text: Optional[OnText], rates: Rates) -> list[Generated]:
        """Generates with beam search; calls `on_text` with the best sequence of each prompt after the search."""
        sampling = self.sampling
        clock = _Clock(rates, sum(map(tokens_of, self.prompts)))
        penalty, beams = sampling.length_penalty, sampling.num_beams
        params = self.params
        search: beam_search.Beams = self.generator.begin_search(
            params, self.batch, self.rules, penalty, self.limits, beams=beams, room=self.capacity
        )
        while True:
            count, ended = jax.device_get((search.count, search.ended))
            self.loaded.progress()
            clock.tick(int(count), (int(count) - 1) * len(self.prompts))
            if ended.all():
                break
            if count == 1:
                search = clock.wait_for_compilation(self.generator.search_on(params, search, self.rules, penalty, 0))
            search = self.generator.search_on(params, search, self.rules, penalty, _CHUNK)
        finished: beam_search.BeamSequences = jax.device_get(search.finished)
        texts = []
        for index in range(len(self.prompts)):
            for rank in range(sampling.num_return):
                length = int(finished.lengths[index, rank])
                if length == 0 and rank > 0:
                    continue  # the constraints allow fewer sequences than num_return
                text = _Text(self, index, on_text if rank == 0 else None)
                text.read(finished.tokens[index, rank, :length].tolist(), True)
                score = float(finished.scores[index, rank]) if length else None
                texts.append(
                    text.generated(np.asarray(finished.log_probs[index, rank]), int(self.limits[index]), score)
                )
        return texts


class _Text:
    """The state of one text during generation; detects stop strings and streams new characters."""

    def __init__(self, job: _Job, number: int, on_text: Optional[OnText]):
        self.job, self.number, self.on_text = job, job.first + number, on_text
        prompt = job.prompts[number]
        self.context_ids = [] if is_encoder_decoder(prompt) else self._last_ids(prompt["tokens"].tolist())
        self.ids: list[int] = []
        self.is_finished, self.stopped, self._num_streamed = False, False, 0

    def read(self, ids: list[int], is_finished: bool) -> None:
        """Updates the text with the token ids generated so far, and calls `on_text` with new characters.

        Args:
          ids: all token ids of the text so far.
          is_finished: whether the text has ended on the device: at the end token, or at its maximum length.
        """
        if self.is_finished:
            return
        stops = self.job.sampling.stop
        if length := stopped_after(ids, len(self.ids), self._decode, stops):
            ids, is_finished, self.stopped = ids[:length], True, True
        self.ids, self.is_finished = ids, is_finished
        if self.on_text is not None:
            text = self.text if is_finished else settled(self.text, stops)
            if new := text[self._num_streamed :]:
                self.on_text(self.number, new)
                self._num_streamed = len(text)

    def _last_ids(self, ids: list[int]) -> list[int]:
        """Returns the last ids of a prompt, from the start of a character, which has at most four bytes.

        Some tokenizers decode all adjacent byte tokens to U+FFFD if the first of them is not the start of a character.
        """
        ends = (ids[-count:] for count in range(_CONTEXT, _CONTEXT + 4))
        decode = self.job.loaded.tokenizer.decode
        return next((end for end in ends if not decode(end).startswith("\ufffd")), ids[-_CONTEXT:])

    @property
    def text(self) -> str:
        text = self._decode(self.ids)
        return text[: find_stop(text, self.job.sampling.stop)] if self.stopped else text

    def _decode(self, ids: Sequence[int]) -> str:
        """Decodes token ids without the tokens around a text, as a continuation of the last token ids of the prompt."""
        decode, around = self.job.loaded.tokenizer.decode, self.job.around
        written = [n for n, i in enumerate(ids) if i not in around and i not in self.job.ends]
        ids = ids[written[0] : written[-1] + 1] if written else []
        ids = [i for i in ids if i not in self.job.ends]
        return decode([*self.context_ids, *ids])[len(decode(self.context_ids)) :]

    def generated(self, log_probs: np.ndarray, limit: int, score: Optional[float] = None) -> Generated:
        job = self.job
        ended: Ended = "context" if limit < job.max_lengths[self.number - job.first] else "length"
        if self.stopped:
            ended = "stop"
        elif len(self.ids) < limit:
            ended = "eos" if self.ids and self.ids[-1] in job.ends else "blocked"
        elif self.ids[-1] in job.ends and not job.sampling.forced_eos_token_id:
            ended = "eos"
        ids_log_probs = tuple(log_probs[: len(self.ids)].tolist())
        return Generated(self.number, self.text, tuple(self.ids), ids_log_probs, ended, score)


class _Clock:
    """Adds the time between consecutive reads from the device to `Rates`; the first interval is the prefill."""

    def __init__(self, rates: Rates, prompt_tokens: int):
        rates.prompt_tokens += prompt_tokens
        self.rates, self.last, self.count, self.tokens = rates, time.perf_counter(), 0, 0

    def tick(self, count: int, tokens: int) -> None:
        """Adds the time and the tokens of a chunk to `Rates`, at the end of the chunk.

        Args:
          count: number of tokens generated so far in each row that has not ended.
          tokens: number of tokens generated so far in all rows, excluding the first token of each row.
        """
        now, rates = time.perf_counter(), self.rates
        if self.count == 0:
            rates.prefill_seconds += now - self.last
        else:
            rates.step_seconds += now - self.last
            rates.steps += count - self.count
            rates.step_tokens += tokens - self.tokens
        self.last, self.count, self.tokens = now, count, tokens

    def wait_for_compilation(self, result: PyTree) -> PyTree:
        """Waits until a jitted function is compiled, and adds this time to the prefill.

        Args:
          result: result of a call of the function with zero steps, which serves only to compile it.

        Returns:
          `result`, when it is ready.
        """
        result, now = jax.block_until_ready(result), time.perf_counter()
        self.rates.prefill_seconds += now - self.last
        self.last = now
        return result


def _max_new_tokens(prompt: Example, sampling: Sampling) -> int:
    """Returns the maximum number of tokens to generate after a prompt, without the limit of the model."""
    if sampling.max_length is None:
        return sampling.max_new_tokens
    room = sampling.max_length - len(prompt["tokens"])
    if room < 1:
        raise UserError(
            f"max_length is {sampling.max_length}, and the prompt has {len(prompt['tokens'])} tokens: set "
            "max_new_tokens, which does not count the prompt"
        )
    return min(sampling.max_new_tokens, room)


def rules_of(loaded: LoadedModel, sampling: Sampling) -> Rules:
    """Converts sampling options to `Rules` for the device; raises UserError for tokens outside the vocabulary."""
    tokenizer, rows, ends = loaded.tokenizer, loaded.experiment.model.vocab_size, loaded.end_tokens
    automata = []
    if sampling.banned_strings or sampling.regex:
        special = tokenizer.vocabulary.special_ids.union(tokenizer.special_patterns.values())
        vocabulary_args = tokenizer.spellings(), special, rows
        if sampling.banned_strings:
            automata.append(without_strings(sampling.banned_strings, *vocabulary_args))
        if sampling.regex:
            automata.append(matching(sampling.regex, *vocabulary_args, ends))
    allowed = allowed_ids(sampling.allowed_tokens, sampling.banned_tokens, tokenizer, rows, ends)
    first, last = sampling.forced_bos_token_id, sampling.forced_eos_token_id
    sequences, no_first = sampling.banned_sequences, sampling.banned_first_tokens
    mask = lambda option, ids: jnp.asarray(mask_of(option, ids, tokenizer, rows))  # noqa: E731
    allowed = jnp.asarray(allowed) & ~mask("banned_sequences", [s[0] for s in sequences if len(s) == 1])
    lengths = sorted({len(sequence) for sequence in sequences if len(sequence) > 1})
    searches, is_decoder = sampling.num_beams > 1, loaded.experiment.model.family == "decoder"
    return Rules(
        allowed=allowed,
        ends=jnp.array(ends, jnp.int32),
        automata=tuple(automata),
        temperature=sampling.temperature or None,
        banned_sequences=tuple(jnp.array([s for s in sequences if len(s) == n], jnp.int32) for n in lengths),
        allowed_first=~mask("banned_first_tokens", no_first) if no_first else None,
        forced_first=None if first is None else mask("forced_bos_token_id", [first]),
        forced_last=mask("forced_eos_token_id", last) if last else None,
        stops=stopping(sampling.stop, tokenizer, rows, ends, is_decoder) if searches and sampling.stop else None,
        renormalizes=sampling.renormalize_logits or None,
        stops_when_full=True if sampling.early_stopping is True else None,
        stops_at_best=True if sampling.early_stopping == "never" else None,
        **{name: getattr(sampling, name) for name in _OPTIONS},
    )


_OPTIONS = (
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size"),
    *("min_new_tokens", "min_length", *SAMPLING_ONLY),
)

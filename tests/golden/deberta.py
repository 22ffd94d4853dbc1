"""Defines cases of DeBERTa: transformers' masked LM, and transformers' encoder with the heads of the authors' files."""

import copy
import dataclasses

from pretrainax.config import DisentangledPositions
from pretrainax.zoo.deberta import FAMILIES, HUGGINGFACE, deberta_v2, deberta_v3
from tests.golden.case import VOCABULARY, Case

V2, V3 = FAMILIES


def tiny(config, **changes):
    """Returns a preset at test size; 14 tokens exceed the exact buckets (2 per side) and the last bucket (from 9)."""
    sizes = dict(
        vocab_size=VOCABULARY,
        num_layers=3,
        d_model=16,
        d_ff=32,
        num_heads=2,
        position=DisentangledPositions(num_buckets=4, max_distance=9, max_length=20),
    )
    return dataclasses.replace(copy.deepcopy(config), generator=None, **sizes | changes)


def discriminator():
    """Returns the authors' discriminator, whose encoder is transformers' encoder."""
    import torch
    import transformers
    from transformers.modeling_outputs import TokenClassifierOutput

    class ReplacedTokenDetectionModel(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            width = config.hidden_size
            self.deberta = transformers.DebertaV2Model(config)
            self.mask_predictions = torch.nn.Module()
            self.mask_predictions.dense = torch.nn.Linear(width, width)
            self.mask_predictions.LayerNorm = torch.nn.LayerNorm(width, config.layer_norm_eps)
            self.mask_predictions.classifier = torch.nn.Linear(width, 1)

        def forward(self, **arguments):
            out, head = self.deberta(**arguments), self.mask_predictions
            x = out.last_hidden_state
            x = torch.nn.functional.gelu(head.dense(head.LayerNorm(x + x[:, :1])))
            return TokenClassifierOutput(logits=head.classifier(x)[..., 0], hidden_states=out.hidden_states)

    return ReplacedTokenDetectionModel(_config(CASES["deberta_v3"].config))


def mask_decoder():
    """Returns the authors' masked LM; its decoder is the last layer of transformers' encoder, with separate queries."""
    import torch
    import transformers
    from transformers.modeling_outputs import MaskedLMOutput

    class MaskedLanguageModel(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            width = config.hidden_size
            self.deberta = transformers.DebertaV2Model(config)
            self.deberta.embeddings.position_embeddings = torch.nn.Embedding(config.max_position_embeddings, width)
            self.lm_predictions = torch.nn.Module()
            self.lm_predictions.lm_head = head = torch.nn.Module()
            head.dense = torch.nn.Linear(width, width)
            head.LayerNorm = torch.nn.LayerNorm(width, config.layer_norm_eps)
            head.bias = torch.nn.Parameter(torch.zeros(config.vocab_size))

        def forward(self, input_ids, attention_mask, output_hidden_states, return_dict):
            del output_hidden_states, return_dict
            embeddings, encoder = self.deberta.embeddings, self.deberta.encoder
            states = self.deberta(input_ids, attention_mask, output_hidden_states=True, return_dict=True).hidden_states
            read, decoded = states[-2], []
            queries = read + embeddings.position_embeddings.weight[None, : input_ids.shape[1]]
            for _ in range(2):
                queries, _ = encoder.layer[-1](
                    read,
                    encoder.get_attention_mask(attention_mask),
                    query_states=queries,
                    relative_pos=encoder.get_rel_pos(read),
                    rel_embeddings=encoder.get_rel_embedding(),
                )
                decoded.append(queries)
            head = self.lm_predictions.lm_head
            x = head.LayerNorm(torch.nn.functional.gelu(head.dense(decoded[-1])))
            logits = x @ embeddings.word_embeddings.weight.T + head.bias
            return MaskedLMOutput(logits=logits, hidden_states=(*states[:-1], decoded[-1]))

    return MaskedLanguageModel(_config(CASES["deberta_v2"].config))


def _config(config):
    import transformers

    theirs = transformers.AutoConfig.for_model(**HUGGINGFACE.write_config(config))
    theirs._attn_implementation = "eager"
    return theirs


CASES = {
    "deberta": Case(
        tiny(
            deberta_v3(),
            masked_lm_head=True,
            replaced_token_head=False,
            replaced_token_context=False,
            enhanced_mask_decoder=False,
        ),
        V3,
    ),
    "deberta_convolution": Case(tiny(deberta_v2(), enhanced_mask_decoder=False), V2),
    "deberta_v2": Case(tiny(deberta_v2()), V2, mask_decoder),
    "deberta_v3": Case(tiny(deberta_v3(), enhanced_mask_decoder=False), V3, discriminator),
}

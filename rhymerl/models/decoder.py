"""The part of a language model that computes hidden states, for which some say no name."""

from __future__ import annotations

from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model without its output embeddings; what is a decoder already is returned as it is.

    transformers finds no decoder in Llama 4, and returns the model. There it is the part that is a model as well.
    `prove_update` checks that its states times the output embeddings are the logits.
    """
    decoder: PreTrainedModel = model.get_decoder()
    if decoder.get_output_embeddings() is None:
        return decoder
    return next((each for each in decoder.children() if isinstance(each, PreTrainedModel)), decoder)

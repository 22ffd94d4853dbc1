"""Building blocks that all model families share.

Modules take the whole ModelConfig. Functions without parameters take plain arguments.

Shapes use these letters, unless a docstring gives a letter a different meaning:

- B: rows of the batch; T: tokens per row, or queries; S: keys, or tokens of the sequence that is attended to
- D: d_model; F: hidden size of a feed-forward layer; L: layers; E: experts
- H: query heads; G: key and value heads; R = H / G: query heads per key head; K: size of a head

"Hidden states" are the residual stream [B, T, D], to which each sublayer adds its output.
"""

"""Building blocks that all model families share.

Modules take the whole ModelConfig. Functions without parameters of their own take plain arguments.

Shapes use these letters, unless a docstring gives a letter a different meaning:

- B: rows of the batch; T: tokens of a row, or queries; S: keys, or tokens of the sequence that attention reads
- D: d_model; F: hidden size of a feed-forward; L: layers; E: experts
- H: query heads; G: key and value heads; R = H / G: query heads per key head; K: size of a head

"The stream" is the residual stream [B, T, D], to which each sublayer adds its output.
"""

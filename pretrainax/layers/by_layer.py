"""Names of the block sums that are reported per layer, for the code that computes them and the code that reads them."""

BY_LAYER = "layers/"  # prefix of the names of sums that are not added over layers; they may be arrays
EXPERT_TOKENS = "expert_tokens"  # [E], number of tokens routed to each expert
ROUTER_ENTROPY = "router_entropy"
DROPPED = "dropped"  # assignments that exceeded an expert's capacity

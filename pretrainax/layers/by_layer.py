"""Names the sums of blocks that are told by layer, for those who make them and for those who only read them."""

BY_LAYER = "layers/"  # begins the names of sums that are not added over layers, and may be arrays
EXPERT_TOKENS = "expert_tokens"  # [E], tokens that a router gave to each expert
ROUTER_ENTROPY = "router_entropy"
DROPPED = "dropped"  # assignments for which there was no room

"""Names of the sums that are reported per layer, used by the layers that compute them and the code that reads them."""

BY_LAYER = "layers/"  # name prefix of sums that are not added up over layers; these sums may be arrays
EXPERT_TOKENS = "expert_tokens"  # [E], number of tokens routed to each expert
ROUTER_ENTROPY = "router_entropy"  # entropy of the router's probabilities, in nats, summed over tokens
DROPPED = "dropped"  # number of token-to-expert assignments that were dropped because the expert was full

"""The policy as a model: loading, adapters, heads, log-probs, the critic, and proofs of what it can do."""

"""The policy as a model: loading, adapters, heads, log-probs, the critic, and proofs that it is computed right."""

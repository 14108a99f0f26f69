"""The parts that any remote engine needs: its process, requests in flight, weights, and a feed for its drafter.

The paths and contents of the HTTP calls are those of SGLang's server; an engine with others brings its own `in_flight`,
`weights`, `weight_group`, `delivery` and `proof`.
"""

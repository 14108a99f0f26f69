"""The parts that any remote engine needs: its process, requests in flight, weights, and a feed for its drafter.

The HTTP calls have SGLang's paths and contents; an engine with other calls brings its own `in_flight`, `weights`,
`weight_group`, `delivery` and `proof`.
"""

"""What any remote engine needs: its process, requests in flight, weights, and a feed for its drafter."""

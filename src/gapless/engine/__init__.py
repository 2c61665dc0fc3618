"""Continuous batching: requests, scheduler, paged KV blocks with a prefix cache, and the loop over the ring."""

"""The tiers `s3`, `gcs` and `azure`: blocks as objects of a bucket; touch names below their prefix, from the loop."""

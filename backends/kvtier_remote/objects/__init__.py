"""The tiers `s3`, `gcs` and `azure`: blocks as objects of a bucket."""

"""Building blocks of the models: plain torch, fp32 where accuracy needs it."""

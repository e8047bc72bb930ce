"""Forms in which `inference.load` keeps a model, by name: apart, so that the command line knows them without torch."""

WEIGHTS = ("12bit", "q8")
"""Of weights, beside those that the files have."""

CACHES = ("int8",)
"""Of keys and values, beside bf16 and fp32, of which the model's weights decide."""

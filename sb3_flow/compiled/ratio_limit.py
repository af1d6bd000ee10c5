"""The bound of importance ratios that losses, NumPy functions and PPO's compiled epoch share."""

MAX_LOG_RATIO = 20.0
"""
Logarithms of ratios are cut here. exp(20) = 4.9e8 is far beyond every clip range, no estimate with such a ratio has a
meaning, and products with advantages are still far from float32's overflow.
"""

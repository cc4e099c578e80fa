"""AdaptiveSpec: adaptive draft trees and the margin rule for stock vLLM.

Importing this package imports neither torch nor vLLM: vLLM loads the plugin entry point in every one of its
processes, used or not, so what runs there must stay cheap.
"""

__version__ = "0.1.0"

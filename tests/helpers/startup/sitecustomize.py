"""Python runs this first in processes of tests, for Keras to be there in two thirds of the time.

Keras loads scikit-learn, Matplotlib and IPython where they are installed, and does without them
where they are not. A script that imports them itself gets them.
"""

import gc
import sys

NOT_NEEDED = ("IPython", "matplotlib", "sklearn")

# A collection goes through all that TensorFlow has loaded, and loading and tracing set off many.
gc.set_threshold(50_000, 20, 50)


def forget_callers(stacks: object) -> None:
    """Has no operation of a graph keep the stack that made it: pytest's is deep, a tenth of all."""
    none = stacks.extract_stack()
    stacks.extract_stack = lambda stacklevel=1: none


class LightKeras:
    """Finds no module that Keras tries to import, but does not need, while it is loaded itself."""

    def find_spec(self, name: str, *unused: object) -> None:
        """Leaves a module to others."""
        if name == "keras.src.backend.tensorflow":  # TensorFlow is there by then
            forget_callers(sys.modules["tensorflow.python.util.tf_stack"])
        spec = getattr(sys.modules.get("keras"), "__spec__", None)
        if name in NOT_NEEDED and getattr(spec, "_initializing", False):
            raise ModuleNotFoundError(f"Keras is loaded without {name} in tests", name=name)


sys.meta_path.insert(0, LightKeras())

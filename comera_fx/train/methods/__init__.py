"""How ranks are brought to zero: rank weights as parameters, or singular values."""

from comera_fx.train.methods.budget import out_of_reach
from comera_fx.train.methods.comera import CoMERA
from comera_fx.train.methods.deaths import above_error
from comera_fx.train.methods.method import Method
from comera_fx.train.methods.singular import SingularValues

__all__ = ["CoMERA", "Method", "SingularValues", "above_error", "out_of_reach"]

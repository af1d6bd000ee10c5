"""
Coefficients of a rational approximation of tanh in float32, odd degree 13 over even degree 6, exact to 4e-7 everywhere (Eigen
and XLA use the same). Beyond ``CLAMP`` tanh is 1 in float32.
"""

import numpy as np

_float = np.float32
CLAMP = _float(7.90531110763549805)
P13, P11, P9 = _float(-2.76076847742355e-16), _float(2.00018790482477e-13), _float(-8.60467152213735e-11)
P7, P5 = _float(5.12229709037114e-08), _float(1.48572235717979e-05)
P3, P1 = _float(6.37261928875436e-04), _float(4.89352455891786e-03)
Q6, Q4 = _float(1.19825839466702e-06), _float(1.18534705686654e-04)
Q2, Q0 = _float(2.26843463243900e-03), _float(4.89352518554385e-03)

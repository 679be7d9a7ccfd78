"The public names; importing this adds the `xla_*` verbs to fastai's `Learner`, and neither imports torch_xla nor starts its runtime"
from .callback import XLAMixedPrecision, XLAOptCallback
from .core import emulate_cores, n_cores
from .data import TPUDistributedDL
from .layers import SyncBatchNorm, convert_sync_bn
from . import checkpoint, inference, learner, spmd

__all__ = ['n_cores', 'emulate_cores', 'XLAOptCallback', 'TPUDistributedDL', 'XLAMixedPrecision', 'SyncBatchNorm', 'convert_sync_bn']

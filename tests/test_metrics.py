"Every metric of fastai on several cores is the number that fastai has on one CPU, whatever the size of the data"
import pytest
from helpers import run_code

# Two batches of all cores and a ragged one; predictions are a model's output on random inputs, so that no metric is trivial.
SETUP = '''
import sys, warnings
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai.vision.all import *
from fastai.text.all import CorpusBLEUMetric
from fastai.metrics import *
from fastai_xla_extensions.all import *
from fastai_xla_extensions.core import emulate_cores

class Identity(Module):
    "Predictions are the inputs; one parameter, so that there is something to train with lr=0"
    def __init__(self): self.w = nn.Parameter(torch.ones(1))
    def forward(self, x): return x*self.w

def learner(x, y, bs, loss_func, metrics, n_valid):
    "Trains on 16 samples with lr=0; validates on `n_valid`"
    trn,val = list(zip(x[:16], y[:16])),list(zip(x[16:16+n_valid], y[16:16+n_valid]))
    dls = DataLoaders(DataLoader(trn, bs=16//(n if bs == 'core' else 1)), DataLoader(val, bs=2 if bs == 'core' else 2*n), device='cpu')
    return Learner(dls, Identity(), loss_func=loss_func, metrics=metrics, opt_func=SGD, cbs=[])

def check(name, x, y, loss_func, metrics, n_valid, act=None):
    l,r = learner(x, y, 'core', loss_func(), metrics(), n_valid),learner(x, y, 'all', loss_func(), metrics(), n_valid)
    for o in (l, r): o.remove_cb(ProgressCallback)
    with l.no_logging(): l.xla_fit(1, 0.)
    with r.no_logging(): r.fit(1, 0.)
    a,b = l.recorder.values[0],r.recorder.values[0]
    assert len(a) == len(b) == 2+len(r.metrics)
    for nm,p,q in zip(l.recorder.metric_names[1:], a, b):
        ok = (p is None and q is None) or (p != p and q != q) or abs(float(p)-float(q)) <= 1e-5*max(1, abs(float(q)))
        print(f'{"ok " if ok else "BAD"} {name} n={n_valid} {nm}: {p} {q}')
        assert ok

n = int(sys.argv[1]); emulate_cores(n)
set_seed(0)
x = torch.randn(80, 5)
'''

SINGLE = '''
y = torch.randint(0, 5, (80,))
y[16:21] = torch.arange(5)   # every class occurs
def single(): return [accuracy, error_rate, partial(top_k_accuracy, k=2), BalancedAccuracy(), CohenKappa(), F1Score(average='macro'), FBeta(2, average='macro'), HammingLoss(),
    Jaccard(average='macro'), Precision(average='macro'), Recall(average='macro'), RocAuc(), MatthewsCorrCoef(), Perplexity(), lambda_metric, ValueMetric(lambda: 3., 'three'), Counts()]
def few(): return [accuracy, Perplexity(), lambda_metric, Counts()]   # scikit-learn refuses so few samples
def lambda_metric(p, t): return (p.max(dim=1).values*(t>1)).sum()/((t>1).sum()+1)   # no mean over samples
class Counts(Metric):
    "A user's own metric, with a state of its own"
    def reset(self): self.seen = {}
    def accumulate(self, learn):
        for o in learn.y.tolist(): self.seen[o] = self.seen.get(o, 0)+1
    @property
    def value(self): return float(sum(k*v**2 for k,v in self.seen.items()))
for n_valid in SIZES: check('single', x, y, CrossEntropyLossFlat, single if n_valid > 7 else few, n_valid)
w = torch.tensor([.1,.2,.3,1.,2.])
check('weighted', x, y, partial(CrossEntropyLossFlat, weight=w), lambda: [accuracy, Perplexity()], 33)
check('ignored', x, y, partial(CrossEntropyLossFlat, ignore_index=2), lambda: [accuracy], 31)
check('focal', x, y, partial(FocalLossFlat, weight=w), lambda: [accuracy], 33)
check('smoothing', x, y, LabelSmoothingCrossEntropyFlat, lambda: [accuracy], 33)
check('lambda', x, y, lambda: lambda p,t: (F.cross_entropy(p, t, reduction='none')**2).mean(), lambda: [accuracy], 33)
class Combined(Module):
    "A loss with a buffer, a parameter and parts that `LossMetric` shows"
    def __init__(self): self.w,self.scale = nn.Parameter(torch.tensor(2.)),nn.Buffer(torch.tensor(3.))
    def forward(self, p, t):
        self.ce,self.reg = F.cross_entropy(p,t)*self.scale,(p**2).mean()*self.w
        return self.ce+self.reg
check('parts', x, y, Combined, lambda: LossMetrics('ce,reg'), 33)
'''

BINARY = '''
y = (torch.rand(80) > .5).long()
x2 = x[:,:2].contiguous()
def binary(): return [APScoreBinary(), RocAucBinary(), BrierScore(), F1Score(), Precision(), Recall(), Jaccard(), FBeta(.5)]
for n_valid in BINARY_SIZES: check('binary', x2, y, CrossEntropyLossFlat, binary, n_valid)
ym = (torch.rand(80, 5) > .5).float(); ym[16:18] = torch.stack([torch.ones(5), torch.zeros(5)])
# scikit-learn refuses what fastai's MatthewsCorrCoefMulti and BrierScoreMulti hand to it, on any device
def multi(): return [accuracy_multi, partial(accuracy_multi, thresh=.3), APScoreMulti(), F1ScoreMulti(), FBetaMulti(2), HammingLossMulti(), JaccardMulti(),
    PrecisionMulti(), RecallMulti(), RocAucMulti()]
for n_valid in BINARY_SIZES: check('multi', x, ym, BCEWithLogitsLossFlat, multi, n_valid)
yr = torch.rand(80, 5)
def regr(): return [mse, mae, msle, rmse, exp_rmspe, ExplainedVariance(), R2Score(), PearsonCorrCoef(), SpearmanCorrCoef()]
for n_valid in BINARY_SIZES: check('regression', x.abs(), yr, MSELossFlat, regr, n_valid)
ys = torch.randint(0, 3, (80, 4, 4)); xs = torch.randn(80, 3, 4, 4)
def segm(): return [foreground_acc, Dice(axis=1), DiceMulti(axis=1), JaccardCoeff(axis=1), JaccardCoeffMulti(axis=1), partial(accuracy, axis=1)]
for n_valid in BINARY_SIZES: check('segmentation', xs, ys, partial(CrossEntropyLossFlat, axis=1), segm, n_valid)
yt = torch.randint(2, 9, (80, 7)); xt = torch.randn(80, 7, 9)
for n_valid in BINARY_SIZES: check('translation', xt, yt, CrossEntropyLossFlat, lambda: [CorpusBLEUMetric(vocab_sz=9), Perplexity(), accuracy], n_valid)
print('done')
'''

@pytest.mark.parametrize('cores', [4, 8, 1])
@pytest.mark.parametrize('part', ['single', 'other'])
def test_metrics(cores, part):
    "Cases 01 and 19: fastai's numbers, whatever the size"
    sizes = (1, 7, 31, 32, 33, 37, 0) if cores == 4 else (1, 33)
    code = SETUP.replace('int(sys.argv[1])', str(cores)) + (SINGLE if part == 'single' else BINARY)
    code = code.replace('BINARY_SIZES', str(tuple(o for o in sizes if o > 7) or (33,))).replace('SIZES', str(sizes))
    out = run_code(code, timeout=280)
    assert 'BAD' not in out

"""A training step through this library against the loop that people write by hand, on one XLA device of this machine's CPU.
Writes benchmarks/step.md. Times are ratios within one run: the two loops take turns."""
import platform, time
from pathlib import Path
import torch
import torch_xla, torch_xla.debug.metrics as met
from fastai.basics import *
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai_xla_extensions.all import *
from datetime import date
from fastai_xla_extensions.core import xla_autograd, xla_device

BS,N,ROUNDS = 64,60,5

def cpu():
    try: return next(l.split(':')[1].strip() for l in open('/proc/cpuinfo') if l.startswith('model name'))
    except (OSError, StopIteration): return platform.processor() or platform.machine()

def mlp(width=256, blocks=8):
    "8 blocks with BatchNorm, 34 parameters"
    layers = [nn.Linear(64, width)]
    for _ in range(blocks): layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))

def data():
    torch.manual_seed(0)
    x,y = torch.randn(N*BS, 64),torch.randint(10, (N*BS,))
    ds = list(zip(x, y))
    return DataLoaders(DataLoader(ds, bs=BS, num_workers=0), DataLoader(ds[:BS], bs=BS), device='cpu')

def total(name): return (met.metric_data(name) or (0,))[0]

class ByHand:
    def __init__(self, dls):
        self.dev,self.dls = xla_device('this benchmark'),dls
        torch.manual_seed(1)
        self.model = mlp().to(self.dev).train()
        self.opt = torch.optim.Adam(self.model.parameters(), 1e-3)
    def __call__(self):
        loss_func = nn.CrossEntropyLoss()
        for x,y in self.dls.train:
            x,y = x.to(self.dev),y.to(self.dev)
            with xla_autograd(): loss_func(self.model(x), y).backward()
            self.opt.step()
            self.opt.zero_grad()
            torch_xla.sync()
        torch_xla.sync(wait=True)

class Ours:
    def __init__(self, dls, opt_func=Adam):
        torch.manual_seed(1)
        self.learn = Learner(dls, mlp(), loss_func=CrossEntropyLossFlat(), opt_func=opt_func).to_xla()
        self.learn.remove_cb(ProgressCallback)
        self.learn.recorder.valid_metrics = False
    def __call__(self):
        self.learn._do_epoch_validate = lambda *args: None
        with self.learn.no_logging(): self.learn.fit(1, 1e-3)
        torch_xla.sync(wait=True)

def timed(f):
    before,t = [total(n) for n in ('CompileTime', 'ExecuteTime', 'TransferFromDeviceTime')],time.perf_counter()
    f()
    return (time.perf_counter()-t)/N*1e3,[(total(n)-b)/N for n,b in zip(('CompileTime', 'ExecuteTime', 'TransferFromDeviceTime'), before)]

def main():
    loops = {'by hand, torch.optim.Adam': ByHand(data()), 'fit, fastai Adam': Ours(data()), 'fit, OptimWrapper(torch.optim.Adam)': Ours(data(), partial(OptimWrapper, opt=torch.optim.Adam))}
    for f in loops.values(): f()   # compiles
    rows = {k: [] for k in loops}
    for _ in range(ROUNDS):
        for k,f in loops.items(): rows[k].append(timed(f))
    ms = {k: sorted(o[0] for o in v)[ROUNDS//2] for k,v in rows.items()}
    base = next(iter(ms.values()))
    lines = [f'# A training step\n', f'{date.today()}, {cpu()}, torch {torch.__version__}, one XLA CPU device; an MLP of 8 blocks with BatchNorm (width 256), batch 64, medians of {ROUNDS} epochs of {N} batches, loops in turn.',
             'Made by `python benchmarks/step.py`.\n', '| loop | ms a batch | of the first | executions a batch | transfers to the host a batch |', '|---|---|---|---|---|']
    for k,v in rows.items(): lines.append(f'| {k} | {ms[k]:.1f} | {ms[k]/base:.2f} | {v[-1][1][1]:.2f} | {v[-1][1][2]:.2f} |')
    text = '\n'.join(lines)+'\n'
    (Path(__file__).parent/'step.md').write_text(text)
    print(text)

if __name__ == '__main__': main()

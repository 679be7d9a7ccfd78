"""Train on scikit-learn's digits with 8 XLA cores, then with one core and a batch 8 times as large: the same weights.

Needs no TPU: the cores are emulated on this machine's CPU."""
import sys
from time import perf_counter
from fastai.vision.all import *
from sklearn.datasets import load_digits
from fastai_xla_extensions.all import *

n_core,bs,n_epoch,lr = 8,8,10,0.01   # `bs` is per core: 8 x 8 = 64 samples a step

images,labels = load_digits(return_X_y=True)   # 1797 images of 8x8 pixels, from 0 to 16
def get_x(i): return (images[i]*15).astype(np.uint8).reshape(8,8)
def get_y(i): return labels[i]

def get_learner(bs):
    "The same model, data and order of samples each time"
    set_seed(42)
    block = DataBlock((ImageBlock(PILImageBW), CategoryBlock), get_x=get_x, get_y=get_y, splitter=RandomSplitter(seed=42))
    dls = block.dataloaders(range(len(labels)), bs=bs, num_workers=0)
    model = nn.Sequential(nn.Conv2d(1,32,3,2,1), nn.ReLU(), nn.Conv2d(32,64,3,2,1), nn.ReLU(), nn.Flatten(), nn.Linear(256,10))
    return Learner(dls, model, metrics=accuracy)

def weights(learn): return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

def main():
    emulate_cores(n_core)   # not on a TPU
    many,one = get_learner(bs),get_learner(bs*n_core)

    start = perf_counter()
    with many.no_bar(): many.xla_fit_one_cycle(n_epoch, lr)
    time_many,start = perf_counter()-start,perf_counter()

    print(f'\n1 core x bs {bs*n_core}, {len(one.dls.train)} steps an epoch')
    with one.xla_ctx(), one.no_bar(), one.no_logging(): one.fit_one_cycle(n_epoch, lr)   # this process takes a core, so it has to come second
    time_one = perf_counter()-start

    acc_many,acc_one = [learn.final_record[-1] for learn in (many,one)]
    a,b = weights(many),weights(one)
    rel = ((a-b).norm()/b.norm()).item()
    print(f"""
              accuracy  seconds
{n_core} cores       {acc_many:.4f}    {time_many:5.1f}
1 core        {acc_one:.4f}    {time_one:5.1f}
largest difference of two weights: {(a-b).abs().max():.1e}, of the weight vectors: {rel:.1e} relative
The cores share one CPU here, so the seconds say nothing about a TPU.""")
    return 0 if min(acc_many,acc_one) >= 0.95 and rel < 1e-4 else 1

if __name__ == '__main__': sys.exit(main())

"""What the order of an epoch costs one core: time, and memory beyond the imports, each case in a fresh process.

`python benchmarks/index_work.py` prints the table that is kept in benchmarks/index_work.md."""
import datetime,platform,subprocess,sys

CASE = '''
import resource, sys, time
from fastai.data.load import DataLoader
from fastai_xla_extensions.data import TPUDistributedDL
n,cores = map(int, sys.argv[1:])
class Many:
    def __len__(self): return n
    def __getitem__(self, i): return i
dl = DataLoader(Many(), bs=64, shuffle=True)
before,start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,time.perf_counter()
if cores: idxs = TPUDistributedDL(dl, 5, cores).get_idxs()
else: idxs = dl.get_idxs()
print(len(idxs), time.perf_counter()-start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss-before)/1024)
'''

def cpu():
    try: return next(o.split(':')[1].strip() for o in open('/proc/cpuinfo') if o.startswith('model name'))
    except (OSError, StopIteration): return platform.processor()

print(f'{datetime.date.today()}, {cpu()}, Python {platform.python_version()}\n')
print('| items | cores | share of one core | seconds | MB |\n|---:|---:|---:|---:|---:|')
for n,cores in [(10**6,0), (10**7,0), (10**6,8), (10**7,8), (10**8,8), (10**8,256), (10**9,256)]:
    out = subprocess.run([sys.executable, '-c', CASE, str(n), str(cores)], capture_output=True, text=True, check=True).stdout.split()
    print(f"| {n:,} | {cores or 'fastai, whole order'} | {int(out[0]):,} | {float(out[1]):.2f} | {float(out[2]):.0f} |", flush=True)

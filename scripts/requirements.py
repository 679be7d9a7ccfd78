"Print what the demo and the tests need, one requirement a line; `--key` prints a name for that list under this python"
import hashlib,platform,sys
from configparser import ConfigParser
from pathlib import Path

if not (3,10) <= sys.version_info < (3,14):
    sys.exit(f'Python 3.10 to 3.13 is needed and this is {platform.python_version()}: choose one with `make ... PYTHON=python3.12`')

config = ConfigParser()
config.read(Path(__file__).resolve().parent.parent/'settings.ini', encoding='utf-8')
cfg = config['DEFAULT']
lines = '\n'.join(cfg['requirements'].split() + cfg['dev_requirements'].split())
python = f'{sys.implementation.name} {platform.python_version()} {platform.machine()}'
print(hashlib.sha256(f'{lines}\n{python}'.encode()).hexdigest()[:12] if sys.argv[1:] == ['--key'] else lines)

from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages,setup

here = Path(__file__).resolve().parent
config = ConfigParser()
config.read(here/'settings.ini', encoding='utf-8')
cfg = config['DEFAULT']

licenses = {'apache2': 'Apache-2.0'}
pythons = '3.10 3.11 3.12 3.13'.split()

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=(here/'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    keywords=cfg['keywords'].split(),
    # The SPDX name and no licence classifier: recent setuptools refuse to have both
    license=licenses[cfg['license']],
    author=cfg['author'],
    python_requires=f">={cfg['min_python']}",
    classifiers=[
        'Development Status :: 3 - Alpha',
        'Intended Audience :: Developers',
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
        'Programming Language :: Python :: 3 :: Only',
    ] + [f'Programming Language :: Python :: {o}' for o in pythons[pythons.index(cfg['min_python']):]],
    packages=find_packages(include=[f"{cfg['lib_name']}*"]),
    install_requires=cfg['requirements'].split(),
    extras_require={o: cfg[f'{o}_requirements'].split() for o in ('xla', 'tpu', 'dev')},
    entry_points={'nbdev': [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
    zip_safe=False,
)

# docker build --target core -t alma .   reads: alma advise, report, due, gate
# docker build --target all -t alma-all .   trains, too: 6 GB, pinned packages
# docker run --rm -v "$PWD:/data" alma advise --matrix losses.csv

FROM python:3.12-slim AS core
WORKDIR /alma
COPY . .
RUN python -m pip install --no-cache-dir --no-compile .
WORKDIR /data
ENTRYPOINT ["alma"]

# The full image has the compilers that fairseq needs.
FROM python:3.12 AS all
WORKDIR /alma
COPY . .
RUN make .venv/ready
ENV PATH=/alma/.venv/bin:$PATH
WORKDIR /data
ENTRYPOINT ["alma"]

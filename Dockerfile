# The web page in a container: docker build --tag classlens . && docker run --rm --publish 7860:7860 classlens
FROM python:3.11-slim
WORKDIR /classlens
# A page for a few people needs no GPU, and the CUDA build of PyTorch takes several GB. For the CPU build, give the address
# of its index: docker build --build-arg TORCH_INDEX=... (see "CPU or CUDA" in docs/install.md).
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir torch ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
COPY . .
RUN pip install --no-cache-dir '.[web]'
RUN useradd --create-home reader
USER reader
WORKDIR /home/reader
EXPOSE 7860
CMD ["classlens", "serve", "--host", "0.0.0.0", "--port", "7860"]

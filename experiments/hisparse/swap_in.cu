// Times SGLang's swap-in kernel for one layer, and its kernel that copies the same tokens for a layer that shares the
// index. KERNEL is the text of its hisparse.cuh, cut out by measure.py.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace device::hisparse {  // of DeepSeek V4's layout, which is not measured
struct Pair { int64_t *value, *scale; };
__device__ inline Pair get_pointer_paged(void*, int32_t) { return {}; }
__device__ inline void transfer_item(void*, void*, int32_t, int32_t) {}
}  // namespace device::hisparse

namespace sglang {
#include KERNEL
}

constexpr int BLOCK = 960, TOP_K = 2048, BUFFER = 4096, PAGE = 64, WIDTH = BUFFER + PAGE, ROUNDS = 24;
constexpr int COPY_BLOCK = 1024, COPY_BLOCKS = 4;  // copy_cache_planned_mla, _prefetch_copy_blocks
constexpr int64_t CONTEXT = 65536, POOL = 1 << 20;

#define CHECK(call)                                                             \
  if (cudaError_t wrong = (call); wrong != cudaSuccess) {                       \
    std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(wrong));         \
    std::exit(1);                                                               \
  }

template <typename T>
T* on_gpu(const std::vector<T>& values) {
  T* made;
  CHECK(cudaMalloc(&made, values.size() * sizeof(T)));
  CHECK(cudaMemcpy(made, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return made;
}

// In each round a request chooses TOP_K - misses tokens that it always chooses, and tokens that it has not chosen before.
// context: KV tokens of each request. Up to BUFFER, all are on the GPU, and none is missed.
void measure(int batch, int64_t context, int misses, int64_t item_bytes, void* host, void* device) {
  std::vector<int32_t> chosen(int64_t(ROUNDS) * batch * TOP_K), held(batch * WIDTH, -1), slots(batch * WIDTH);
  std::vector<int64_t> host_locs(batch * CONTEXT), requests(batch), lengths(batch, context);
  std::vector<int16_t> lru(batch * BUFFER);
  std::mt19937_64 draw(1);
  for (auto& loc : host_locs) loc = draw() % POOL;
  for (int i = 0; i < batch; i++) {
    requests[i] = i;
    for (int j = 0; j < WIDTH; j++) slots[i * WIDTH + j] = i * WIDTH + j;
    for (int j = 0; j < BUFFER; j++) lru[i * BUFFER + j] = j;
    for (int j = 0; j < TOP_K - misses; j++) held[i * WIDTH + j] = j;
    for (int round = 0; round < ROUNDS; round++)
      for (int j = 0; j < TOP_K; j++) {
        int64_t other = TOP_K + (int64_t(round) * misses + j - (TOP_K - misses)) % (CONTEXT - TOP_K - 1);
        chosen[(int64_t(round) * batch + i) * TOP_K + j] = j < TOP_K - misses ? j : other;
      }
  }
  std::vector<int32_t> real{batch};
  auto *d_chosen = on_gpu(chosen), *d_held = on_gpu(held), *d_slots = on_gpu(slots), *d_real = on_gpu(real);
  auto *d_locs = on_gpu(host_locs), *d_requests = on_gpu(requests), *d_lengths = on_gpu(lengths);
  auto* d_lru = on_gpu(lru);
  int32_t* d_out;
  CHECK(cudaMalloc(&d_out, batch * TOP_K * sizeof(int32_t)));
  auto kernel = sglang::load_cache_to_device_buffer_kernel<
      BLOCK, TOP_K, BUFFER, true, false, 1, false, false, false, int64_t, int64_t>;
  constexpr int SHARED = sglang::SmemLayout<TOP_K, BUFFER>::BYTES;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED));
  cudaEvent_t start, end;
  cudaEventCreate(&start);
  cudaEventCreate(&end);
  const int warm = 4;
  for (int round = 0; round < ROUNDS; round++) {
    if (round == warm) cudaEventRecord(start);
    kernel<<<batch, BLOCK, SHARED>>>(
        d_chosen + int64_t(round) * batch * TOP_K, d_held, d_locs, d_slots, host, nullptr, device, nullptr, d_out,
        d_requests, d_lengths, d_lru, d_real, WIDTH, CONTEXT, BUFFER, TOP_K, TOP_K, 1, item_bytes, nullptr, nullptr,
        nullptr, 0);
  }
  cudaEventRecord(end);
  CHECK(cudaDeviceSynchronize());
  float ms;
  cudaEventElapsedTime(&ms, start, end);
  std::printf("swap_in,%d,%ld,%d,%ld,%.2f\n", batch, long(context), misses, long(item_bytes), 1e3 * ms / (ROUNDS - warm));
  for (void* one : {(void*)d_chosen, (void*)d_held, (void*)d_slots, (void*)d_real, (void*)d_locs, (void*)d_requests,
                    (void*)d_lengths, (void*)d_lru, (void*)d_out})
    cudaFree(one);
}

void measure_copies(int batch, int misses, int64_t item_bytes, void* host, void* device) {
  std::vector<int64_t> sources(int64_t(batch) * TOP_K);
  std::vector<int32_t> targets(sources.size()), counts(batch, misses), real{batch};
  std::mt19937_64 draw(1);
  for (size_t i = 0; i < sources.size(); i++) {
    sources[i] = draw() % POOL;
    targets[i] = (i / TOP_K) * WIDTH + i % TOP_K;
  }
  auto* d_sources = on_gpu(sources);
  auto *d_targets = on_gpu(targets), *d_counts = on_gpu(counts), *d_real = on_gpu(real);
  cudaEvent_t start, end;
  cudaEventCreate(&start);
  cudaEventCreate(&end);
  const int warm = 4;
  for (int round = 0; round < ROUNDS; round++) {
    if (round == warm) cudaEventRecord(start);
    sglang::copy_cache_planned_kernel<COPY_BLOCK, true, false, false><<<COPY_BLOCKS, COPY_BLOCK>>>(
        d_sources, d_targets, d_counts, d_real, host, nullptr, device, nullptr, TOP_K, item_bytes);
  }
  cudaEventRecord(end);
  CHECK(cudaDeviceSynchronize());
  float ms;
  cudaEventElapsedTime(&ms, start, end);
  std::printf("copy,%d,%ld,%d,%ld,%.2f\n", batch, long(CONTEXT), misses, long(item_bytes), 1e3 * ms / (ROUNDS - warm));
  for (void* one : {(void*)d_sources, (void*)d_targets, (void*)d_counts, (void*)d_real}) cudaFree(one);
}

int main() {
  const int64_t largest = 1152;
  void *host, *device, *copied;
  CHECK(cudaHostAlloc(&host, POOL * largest, cudaHostAllocDefault));
  CHECK(cudaMalloc(&device, 256 * WIDTH * largest));
  CHECK(cudaMalloc(&copied, POOL * largest));
  std::printf("kernel,batch,context_tokens,missed_tokens,token_bytes,layer_us\n");
  for (int64_t item_bytes : {1152, 656})
    for (int batch : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
      measure(batch, BUFFER, 0, item_bytes, host, device);
      for (int misses : {0, 20, 64, 205, 512, 1024, 2048}) {
        measure(batch, CONTEXT, misses, item_bytes, host, device);
        measure_copies(batch, misses, item_bytes, host, device);
      }
    }
  cudaEvent_t start, end;
  cudaEventCreate(&start);
  cudaEventCreate(&end);
  for (int way = 0; way < 2; way++) {
    auto kind = way ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
    cudaMemcpy(way ? host : copied, way ? copied : host, POOL * largest, kind);
    cudaEventRecord(start);
    cudaMemcpyAsync(way ? host : copied, way ? copied : host, POOL * largest, kind);
    cudaEventRecord(end);
    CHECK(cudaDeviceSynchronize());
    float ms;
    cudaEventElapsedTime(&ms, start, end);
    std::fprintf(stderr, "copy %s: %.1f GB/s\n", way ? "to the host" : "to the GPU", POOL * largest / ms / 1e6);
  }
}

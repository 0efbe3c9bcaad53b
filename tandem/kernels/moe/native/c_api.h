/* Tandem's CPU kernels, for any language. No function takes an interpreter lock or touches Python. */
#ifndef TANDEM_C_API_H
#define TANDEM_C_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TANDEM_CPU_ABI 1
#define TANDEM_API __attribute__((visibility("default")))

typedef struct tandem_engine tandem_engine;

/* Where the tiles of one matrix lie in an expert's record (lookup.h defines a tile). All in bytes. */
typedef struct {
  int64_t offset;        /* of the first tile, from the record's start */
  int64_t tile_stride;   /* to the next 64 rows */
  int64_t window_stride; /* to the next window of inputs of the same rows */
  int64_t base_offset;   /* of the f32 that multiplies all scales, from the record's start; -1: none */
} tandem_matrix;

/* How the records of one section are coded. */
typedef struct {
  int32_t kind; /* 0: sac, 1: fp4 */
  int32_t reserved;
  tandem_matrix gate, up, down;
} tandem_code;

typedef struct {
  int32_t hidden;
  int32_t inner;   /* intermediate size; rows of gate and up */
  int32_t experts; /* number of entries of `records` and `code_of` */
  int32_t weight_on_input;
  float limit; /* SwiGLU: infinity is no clamp */
  float alpha;
  float beta;
  int32_t codes;                /* number of entries of `code` */
  const tandem_code* code;      /* sections */
  const int32_t* code_of;       /* [experts]: index into `code` */
  const uint8_t* const* records; /* [experts] */
} tandem_layer;

typedef struct {
  int32_t tokens;
  int32_t experts_per_token; /* K */
  int32_t dtype;             /* of x and y: 0 f32, 1 bf16, 2 f16 */
  int32_t poison;            /* not 0: fill buffers with NaN first, for checks */
  const void* x;             /* [tokens, hidden] */
  const float* weights;      /* [tokens, K], the router's */
  const int32_t* ids;        /* [tokens, K]; below 0: no expert */
  void* y;                   /* [tokens, hidden] */
} tandem_batch;

TANDEM_API int32_t tandem_cpu_abi(void);

/* Names of the kernels that this CPU can run, comma-separated, slowest first. */
TANDEM_API const char* tandem_cpu_kernels(void);

/* One thread for each of `counts`: counts[i] CPUs of `cpus` that it may run on, 0: any. `kernel`: a name, "" the fastest.
 * `taps`: [3][2][16], the constant of the sac code. Null on failure, with a line in `error`. */
TANDEM_API tandem_engine* tandem_engine_new(const int32_t* cpus, const int32_t* counts, int32_t threads, int64_t spin_us,
                                 const char* kernel, const float* taps, char* error, int32_t error_bytes);
TANDEM_API void tandem_engine_free(tandem_engine* engine);

TANDEM_API const char* tandem_engine_kernel(const tandem_engine* engine);

/* Number of threads that could not be pinned; their reasons, one a line, in `reasons`. */
TANDEM_API int32_t tandem_engine_pin_failures(const tandem_engine* engine, char* reasons, int32_t reason_bytes);

/* 0: done. Otherwise a line in `error`: 1 the arguments do not fit, 2 a thread is dead and so is the engine. Calls of
 * several threads take turns. */
TANDEM_API int32_t tandem_moe(tandem_engine* engine, const tandem_layer* layer, const tandem_batch* batch, char* error,
                   int32_t error_bytes);

/* Tiles [tiles][windows] of one matrix times x [tokens][windows * (64 or 32)] f32 -> y [tokens][tiles * 64] f32, on the
 * calling thread, `repeat` times: for tests, and for rates without memory or threads. */
TANDEM_API int32_t tandem_multiply(const char* kernel, const float* taps, int32_t kind, const uint8_t* tiles, int64_t tile_stride,
                        int64_t window_stride, int32_t tile_count, int32_t windows, const float* x, int32_t tokens,
                        int32_t repeat, float* y, double* best_seconds, char* error, int32_t error_bytes);

/* Reads each thread's even part of `bytes` bytes at `data` in one of three ways (0-2): seconds, or below 0 on failure. */
TANDEM_API double tandem_read(tandem_engine* engine, const uint8_t* data, int64_t bytes, int32_t way);

/* Cycles a nanosecond of the calling thread's core. */
TANDEM_API double tandem_core_ghz(void);

/* Weights [windows][64] f32, finite -> nibbles [windows][32], scales [windows] of the sac code. `taps`: as above. `levels`:
 * [256], the factor of each scale byte, rising from 1 on. A window's first scale is its RMS; the byte that is tried at
 * `tries` steps around it and leaves the least squared error is kept. `base`: at least the largest RMS. */
TANDEM_API void tandem_sac_encode(const float* taps, const float* levels, const float* weights, int64_t windows, float base,
                       const int32_t* tries, int32_t count, int32_t threads, uint8_t* nibbles, uint8_t* scales);

/* For tests: thread `index` ends as if it had been killed when the next call reaches it. */
TANDEM_API void tandem_engine_kill(tandem_engine* engine, int32_t index);

#ifdef __cplusplus
}
#endif

#endif

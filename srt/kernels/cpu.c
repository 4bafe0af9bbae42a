/* L4, each rank: the loops in which a CPU spends a step, for x86-64 with AVX2, FMA and F16C. Attention is in
 * cpu_attention.c.
 *
 * Python gives addresses and sizes; srt/kernels/cpu.py knows what they mean and checks them. Activations are
 * float32 and rows are contiguous. Shapes: N tokens, I input and O output features, D normalised features, F features
 * of the feed-forward block, H query heads, G key/value heads, C head_dim (a multiple of 16), V vocabulary.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cpu.h"

enum { LANES = 16 };     /* outputs of a panel: two registers of float32 */
enum { TILE_ROWS = 6 };  /* tokens multiplied at once: 12 accumulators, 2 weights and 1 input fill the 16 registers */
enum { GROUP = 4 };      /* panels that take turns on one tile of tokens, so that they stay in L2 and the tokens in L1 */
enum { SERIAL = 16384 }; /* elements below which waking other cores costs more than it saves */

/* ---- linear: y = x Wᵀ + b ------------------------------------------------------------------------------------------
 *
 * Weights lie in panels of 16 outputs, [ceil(O / 16), I, 16] of two bytes each, padded with zeros: one pass over a
 * panel reads memory from end to end. bfloat16 panels hold outputs 0, 8, 1, 9 ...: then a register of 16 becomes
 * outputs 0-7 by a shift and outputs 8-15 by a mask, for a bfloat16 is the upper half of a float32.
 */

INLINE void load_weights(int half, const uint16_t *at, __m256 *low, __m256 *high)
{
    if (half) {
        *low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
        *high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at + 8)));
    } else {
        __m256i both = _mm256_loadu_si256((const __m256i *)at);
        *low = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        *high = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xFFFF0000)));
    }
}

/* `rows` tokens times one panel. `unroll` sums run side by side, so that one does not wait for the other's addition. */
INLINE void tile(int rows, int unroll, int half, const float *x, const uint16_t *panel, long inputs, float *out)
{
    __m256 sum[4][TILE_ROWS][2], low, high;
#pragma GCC unroll 4
    for (int u = 0; u < unroll; u++)
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) sum[u][r][0] = sum[u][r][1] = _mm256_setzero_ps();
    long i = 0;
    for (; i + unroll <= inputs; i += unroll)
#pragma GCC unroll 4
        for (int u = 0; u < unroll; u++) {
            load_weights(half, panel + (i + u) * LANES, &low, &high);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                __m256 input = _mm256_broadcast_ss(x + r * inputs + i + u);
                sum[u][r][0] = _mm256_fmadd_ps(input, low, sum[u][r][0]);
                sum[u][r][1] = _mm256_fmadd_ps(input, high, sum[u][r][1]);
            }
        }
    for (; i < inputs; i++) {
        load_weights(half, panel + i * LANES, &low, &high);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            __m256 input = _mm256_broadcast_ss(x + r * inputs + i);
            sum[0][r][0] = _mm256_fmadd_ps(input, low, sum[0][r][0]);
            sum[0][r][1] = _mm256_fmadd_ps(input, high, sum[0][r][1]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int u = 1; u < unroll; u++) {
            sum[0][r][0] = _mm256_add_ps(sum[0][r][0], sum[u][r][0]);
            sum[0][r][1] = _mm256_add_ps(sum[0][r][1], sum[u][r][1]);
        }
        _mm256_storeu_ps(out + r * LANES, sum[0][r][0]);
        _mm256_storeu_ps(out + r * LANES + 8, sum[0][r][1]);
    }
}

INLINE void any_tile(int rows, int half, const float *x, const uint16_t *panel, long inputs, float *out)
{
    switch (rows) {
    case 1: tile(1, 4, half, x, panel, inputs, out); break;
    case 2: tile(2, 2, half, x, panel, inputs, out); break;
    case 3: tile(3, 2, half, x, panel, inputs, out); break;
    case 4: tile(4, 1, half, x, panel, inputs, out); break;
    case 5: tile(5, 1, half, x, panel, inputs, out); break;
    default: tile(6, 1, half, x, panel, inputs, out);
    }
}

INLINE void panels_times(int half, const float *x, long tokens, const uint16_t *weight, long inputs, long outputs,
                         const float *bias, float *y, long begin, long end)
{
    float out[TILE_ROWS * LANES];
    long tiles = (tokens + TILE_ROWS - 1) / TILE_ROWS;
    for (long first = begin; first < end; first += GROUP)
        for (long t = 0, token = 0; t < tiles; t++) {
            int rows = (int)((tokens - token) / (tiles - t)); /* as equal as they come: two tiles of 4, not 6 and 2 */
            for (long p = first; p < MIN(first + GROUP, end); p++) {
                any_tile(rows, half, x + token * inputs, weight + p * inputs * LANES, inputs, out);
                long base = p * LANES, count = MIN(LANES, outputs - base);
                for (int r = 0; r < rows; r++) {
                    float *to = y + (token + r) * outputs + base;
                    for (long o = 0; o < count; o++) to[o] = out[r * LANES + o] + (bias ? bias[base + o] : 0.0f);
                }
            }
            token += rows;
        }
}

static void linear(int half, const float *x, long tokens, const uint16_t *weight, long inputs, long outputs,
                   const float *bias, float *y)
{
    long panels = (outputs + LANES - 1) / LANES;
#pragma omp parallel
    {
        long threads = omp_get_num_threads(), own = omp_get_thread_num();
        long begin = panels * own / threads, end = panels * (own + 1) / threads;
        if (half)
            panels_times(1, x, tokens, weight, inputs, outputs, bias, y, begin, end);
        else
            panels_times(0, x, tokens, weight, inputs, outputs, bias, y, begin, end);
    }
}

/* ---- between the matrices ----------------------------------------------------------------------------------------- */

/* In `rows` rows of `heads` vectors of D features each: y = x / sqrt(mean(x²) + eps) · w. */
static void rms_norm(const float *x, long x_stride, float *y, long y_stride, const float *weight, long rows, long heads,
                     long size, float eps)
{
#pragma omp parallel for collapse(2) schedule(static) if (rows * heads * size > SERIAL)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const float *from = x + r * x_stride + h * size;
            float *to = y + r * y_stride + h * size;
            __m256 squares[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
            for (long d = 0; d < size; d += 16)
                for (int u = 0; u < 2; u++) {
                    __m256 value = _mm256_loadu_ps(from + d + 8 * u);
                    squares[u] = _mm256_fmadd_ps(value, value, squares[u]);
                }
            float mean = sum8(_mm256_add_ps(squares[0], squares[1])) / (float)size;
            __m256 scale = _mm256_set1_ps(1.0f / sqrtf(mean + eps));
            for (long d = 0; d < size; d += 8) {
                __m256 value = _mm256_mul_ps(_mm256_loadu_ps(from + d), scale);
                _mm256_storeu_ps(to + d, _mm256_mul_ps(value, _mm256_loadu_ps(weight + d)));
            }
        }
}

/* In place: pairs of neighbours of the first `heads` heads of each token, multiplied as complex numbers. */
static void rotate(float *x, long stride, const float *turns, long tokens, long heads, long size)
{
#pragma omp parallel for schedule(static) if (tokens * heads * size > SERIAL)
    for (long n = 0; n < tokens; n++)
        for (long h = 0; h < heads; h++)
            for (long c = 0; c < size; c += 8) {
                float *at = x + n * stride + h * size + c;
                __m256 pair = _mm256_loadu_ps(at), turn = _mm256_loadu_ps(turns + n * size + c);
                __m256 crossed = _mm256_mul_ps(_mm256_permute_ps(pair, 0xB1), _mm256_movehdup_ps(turn));
                _mm256_storeu_ps(at, _mm256_fmaddsub_ps(pair, _mm256_moveldup_ps(turn), crossed));
            }
}

/* Each token's keys and values, `width` elements, to its slot. */
static void store(int half, const float *kv, long stride, const int64_t *slots, long tokens, long width, void *cache)
{
    for (long n = 0; n < tokens; n++) {
        const float *from = kv + n * stride;
        if (!half) {
            memcpy((float *)cache + slots[n] * width, from, (size_t)width * sizeof(float));
            continue;
        }
        uint16_t *to = (uint16_t *)cache + slots[n] * width;
        for (long i = 0; i < width; i += 8)
            _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
}

static void silu_and_mul(const float *gate_up, float *y, long tokens, long size)
{
#pragma omp parallel for schedule(static) if (tokens * size > SERIAL)
    for (long n = 0; n < tokens; n++)
        for (long f = 0; f < size; f += 8) {
            const float *at = gate_up + 2 * n * size + f;
            __m256 gate = _mm256_loadu_ps(at), up = _mm256_loadu_ps(at + size), one = _mm256_set1_ps(1.0f);
            __m256 power = exp8(_mm256_sub_ps(_mm256_setzero_ps(), gate));
            __m256 silu = _mm256_div_ps(gate, _mm256_add_ps(one, power));
            _mm256_storeu_ps(y + n * size + f, _mm256_mul_ps(silu, up));
        }
}

/* The first of the largest values of each row. */
static void argmax(const float *x, long stride, long rows, long size, int64_t *to)
{
#pragma omp parallel for schedule(static) if (rows * size > SERIAL)
    for (long r = 0; r < rows; r++) {
        const float *row = x + r * stride;
        __m256 most = _mm256_set1_ps(-INFINITY);
        long i = 0;
        for (; i + 8 <= size; i += 8) most = _mm256_max_ps(_mm256_loadu_ps(row + i), most);
        float best = max8(most);
        for (; i < size; i++) best = row[i] > best ? row[i] : best;
        to[r] = 0;
        for (i = 0; i < size; i++)
            if (row[i] == best) {
                to[r] = i;
                break;
            }
    }
}

/* ---- the module ---------------------------------------------------------------------------------------------------- */

enum { MOST_ARGUMENTS = 14 };

/* Addresses and sizes. False with an exception set if their number is not `count` or one is no integer. */
static int integers(PyObject *const *args, Py_ssize_t given, int count, int64_t *to)
{
    if (given != count) {
        PyErr_Format(PyExc_TypeError, "takes %d arguments, got %zd", count, given);
        return 0;
    }
    for (int i = 0; i < count; i++) {
        to[i] = PyLong_AsLongLong(args[i]);
        if (to[i] == -1 && PyErr_Occurred()) return 0;
    }
    return 1;
}

#define FUNCTION(name, count, call)                                                              \
    static PyObject *py_##name(PyObject *self, PyObject *const *args, Py_ssize_t given)          \
    {                                                                                            \
        int64_t a[MOST_ARGUMENTS];                                                               \
        (void)self;                                                                              \
        if (!integers(args, given, count, a)) return NULL;                                       \
        int failed = 0;                                                                          \
        Py_BEGIN_ALLOW_THREADS call;                                                             \
        Py_END_ALLOW_THREADS if (failed) return PyErr_NoMemory();                                \
        Py_RETURN_NONE;                                                                          \
    }

FUNCTION(linear, 8,
         linear((int)a[0], (float *)a[1], a[2], (uint16_t *)a[3], a[4], a[5], (float *)a[6], (float *)a[7]))
FUNCTION(rotate, 6, rotate((float *)a[0], a[1], (float *)a[2], a[3], a[4], a[5]))
FUNCTION(store, 7, store((int)a[0], (float *)a[1], a[2], (int64_t *)a[3], a[4], a[5], (void *)a[6]))
FUNCTION(silu_and_mul, 4, silu_and_mul((float *)a[0], (float *)a[1], a[2], a[3]))
FUNCTION(argmax, 5, argmax((float *)a[0], a[1], a[2], a[3], (int64_t *)a[4]))
#define ATTENTION                                                                                                      \
    {.half = (int)a[0],                                                                                                \
     .q = (float *)a[1],                                                                                               \
     .q_stride = a[2],                                                                                                 \
     .out = (float *)a[3],                                                                                             \
     .cache = (void *)a[4],                                                                                            \
     .slots = (int32_t *)a[5],                                                                                         \
     .slots_stride = a[6],                                                                                             \
     .rows = (int64_t *)a[7],                                                                                          \
     .lengths = (int64_t *)a[8],                                                                                       \
     .num_rows = a[9],                                                                                                 \
     .num_heads = a[10],                                                                                               \
     .num_kv_heads = a[11],                                                                                            \
     .head_dim = a[12]}

FUNCTION(decode, 13, failed = decode(&(Attention)ATTENTION))
FUNCTION(prefill, 14, failed = prefill(&(Attention)ATTENTION, (int64_t *)a[13]))

static PyObject *py_rms_norm(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    int64_t a[MOST_ARGUMENTS];
    (void)self;
    if (given != 9) {
        PyErr_Format(PyExc_TypeError, "takes 9 arguments, got %zd", given);
        return NULL;
    }
    double eps = PyFloat_AsDouble(args[8]);
    if ((eps == -1.0 && PyErr_Occurred()) || !integers(args, 8, 8, a)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    rms_norm((float *)a[0], a[1], (float *)a[2], a[3], (float *)a[4], a[5], a[6], a[7], (float)eps);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {METHOD(linear),       METHOD(rms_norm), METHOD(rotate), METHOD(store),
                                METHOD(silu_and_mul), METHOD(argmax),   METHOD(decode), METHOD(prefill),
                                {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "lockstep_cpu", "The inner loops of srt/kernels/cpu.py.", -1, methods, NULL, NULL, NULL,
    NULL};

PyMODINIT_FUNC PyInit_lockstep_cpu(void)
{
    return PyModule_Create(&definition);
}

/* L4, each rank: the loops in which a CPU spends a step, for x86-64 with AVX2, FMA and F16C. Attention is in
 * cpu_attention.c, the threads that share the work in cpu_team.c.
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
 * Weights lie in panels of 16 outputs, [ceil(O / 16), I, 16], padded with zeros: one pass over a panel reads memory
 * from end to end. bfloat16 panels hold outputs 0, 8, 1, 9 ...: then a register of 16 becomes outputs 0-7 by a shift
 * and outputs 8-15 by a mask, for a bfloat16 is the upper half of a float32.
 */

enum Format { BFLOAT16, FLOAT16, FLOAT32 };

INLINE long panel_bytes(int format, long inputs)
{
    return inputs * LANES * (format == FLOAT32 ? 4 : 2);
}

/* A panel's weights of input i. */
INLINE void load_weights(int format, const char *panel, long i, __m256 *low, __m256 *high)
{
    const char *at = panel + panel_bytes(format, i);
    if (format == FLOAT32) {
        *low = _mm256_loadu_ps((const float *)at);
        *high = _mm256_loadu_ps((const float *)at + 8);
    } else if (format == FLOAT16) {
        *low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
        *high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at + 1));
    } else {
        __m256i both = _mm256_loadu_si256((const __m256i *)at);
        *low = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        *high = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xFFFF0000)));
    }
}

/* `rows` tokens times one panel. `unroll` sums run side by side, so that one does not wait for the other's addition. */
INLINE void tile(int rows, int unroll, int format, const float *x, const char *panel, long inputs, float *out)
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
            load_weights(format, panel, i + u, &low, &high);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                __m256 input = _mm256_broadcast_ss(x + r * inputs + i + u);
                sum[u][r][0] = _mm256_fmadd_ps(input, low, sum[u][r][0]);
                sum[u][r][1] = _mm256_fmadd_ps(input, high, sum[u][r][1]);
            }
        }
    for (; i < inputs; i++) {
        load_weights(format, panel, i, &low, &high);
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

INLINE void any_tile(int rows, int format, const float *x, const char *panel, long inputs, float *out)
{
    switch (rows) {
    case 1: tile(1, 4, format, x, panel, inputs, out); break;
    case 2: tile(2, 2, format, x, panel, inputs, out); break;
    case 3: tile(3, 2, format, x, panel, inputs, out); break;
    case 4: tile(4, 1, format, x, panel, inputs, out); break;
    case 5: tile(5, 1, format, x, panel, inputs, out); break;
    default: tile(6, 1, format, x, panel, inputs, out);
    }
}

typedef struct {
    int format; /* of the weight */
    const float *x;
    const char *weight;
    const float *bias;
    float *y;
    long tokens, inputs, outputs;
} Linear;

INLINE void panels_times(int format, const Linear *a, long begin, long end)
{
    float out[TILE_ROWS * LANES];
    long tiles = (a->tokens + TILE_ROWS - 1) / TILE_ROWS;
    for (long first = begin; first < end; first += GROUP)
        for (long t = 0, token = 0; t < tiles; t++) {
            int rows = (int)((a->tokens - token) / (tiles - t)); /* as equal as they come: two tiles of 4, not 6 and 2 */
            for (long p = first; p < MIN(first + GROUP, end); p++) {
                const char *panel = a->weight + p * panel_bytes(format, a->inputs);
                any_tile(rows, format, a->x + token * a->inputs, panel, a->inputs, out);
                long base = p * LANES, count = MIN(LANES, a->outputs - base);
                for (int r = 0; r < rows; r++) {
                    float *to = a->y + (token + r) * a->outputs + base;
                    for (long o = 0; o < count; o++) to[o] = out[r * LANES + o] + (a->bias ? a->bias[base + o] : 0.0f);
                }
            }
            token += rows;
        }
}

static void linear_of(const void *argument, long begin, long end)
{
    const Linear *a = argument;
    switch (a->format) {
    case BFLOAT16: panels_times(BFLOAT16, a, begin, end); break;
    case FLOAT16: panels_times(FLOAT16, a, begin, end); break;
    default: panels_times(FLOAT32, a, begin, end);
    }
}

static void linear(const Linear *a)
{
    share_out(linear_of, a, (a->outputs + LANES - 1) / LANES, 1);
}

/* ---- between the matrices ----------------------------------------------------------------------------------------- */

typedef struct {
    const float *x, *weight;
    float *y;
    long x_stride, y_stride, rows, heads, size;
    float eps;
} RmsNorm;

static void rms_norm_of(const void *argument, long begin, long end)
{
    const RmsNorm *a = argument;
    for (long r = begin; r < end; r++)
        for (long h = 0; h < a->heads; h++) {
            const float *from = a->x + r * a->x_stride + h * a->size;
            float *to = a->y + r * a->y_stride + h * a->size;
            __m256 squares[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
            for (long d = 0; d < a->size; d += 16)
                for (int u = 0; u < 2; u++) {
                    __m256 value = _mm256_loadu_ps(from + d + 8 * u);
                    squares[u] = _mm256_fmadd_ps(value, value, squares[u]);
                }
            float mean = sum8(_mm256_add_ps(squares[0], squares[1])) / (float)a->size;
            __m256 scale = _mm256_set1_ps(1.0f / sqrtf(mean + a->eps));
            for (long d = 0; d < a->size; d += 8) {
                __m256 value = _mm256_mul_ps(_mm256_loadu_ps(from + d), scale);
                _mm256_storeu_ps(to + d, _mm256_mul_ps(value, _mm256_loadu_ps(a->weight + d)));
            }
        }
}

/* In `rows` rows of `heads` vectors of D features each: y = x / sqrt(mean(x²) + eps) · w. */
static void rms_norm(const RmsNorm *a)
{
    share_out(rms_norm_of, a, a->rows, SERIAL / (a->heads * a->size));
}

typedef struct {
    float *x;
    const float *turns;
    long stride, tokens, heads, size;
} Rotate;

static void rotate_of(const void *argument, long begin, long end)
{
    const Rotate *a = argument;
    for (long n = begin; n < end; n++)
        for (long h = 0; h < a->heads; h++)
            for (long c = 0; c < a->size; c += 8) {
                float *at = a->x + n * a->stride + h * a->size + c;
                __m256 pair = _mm256_loadu_ps(at), turn = _mm256_loadu_ps(a->turns + n * a->size + c);
                __m256 crossed = _mm256_mul_ps(_mm256_permute_ps(pair, 0xB1), _mm256_movehdup_ps(turn));
                _mm256_storeu_ps(at, _mm256_fmaddsub_ps(pair, _mm256_moveldup_ps(turn), crossed));
            }
}

/* In place: pairs of neighbours of the first `heads` heads of each token, multiplied as complex numbers. */
static void rotate(const Rotate *a)
{
    share_out(rotate_of, a, a->tokens, SERIAL / (a->heads * a->size));
}

/* Each token's keys and values, `width` elements, to its slot. What float16 is too narrow for becomes its largest
 * number, and so does NaN; in float32 that is 2^64, next to which the weight of a masked position, 2^-126, is nothing.
 * Otherwise they would spoil tokens before them, which others share, since 0 times infinity is no number. */
static void store(int half, const float *kv, long stride, const int64_t *slots, long tokens, long width, void *cache)
{
    float bound = half ? 65504.0f : 0x1p64f;
    const __m256 most = _mm256_set1_ps(bound), least = _mm256_set1_ps(-bound);
    for (long n = 0; n < tokens; n++)
        for (long i = 0; i < width; i += 8) {
            long at = slots[n] * width + i;
            __m256 value = _mm256_min_ps(_mm256_loadu_ps(kv + n * stride + i), most); /* of NaN and b, min makes b */
            value = _mm256_max_ps(value, least);
            if (half)
                _mm_storeu_si128((__m128i *)((uint16_t *)cache + at), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
            else
                _mm256_storeu_ps((float *)cache + at, value);
        }
}

typedef struct {
    const float *gate_up;
    float *y;
    long tokens, size;
} SiluAndMul;

static void silu_and_mul_of(const void *argument, long begin, long end)
{
    const SiluAndMul *a = argument;
    for (long n = begin; n < end; n++)
        for (long f = 0; f < a->size; f += 8) {
            const float *at = a->gate_up + 2 * n * a->size + f;
            __m256 gate = _mm256_loadu_ps(at), up = _mm256_loadu_ps(at + a->size), one = _mm256_set1_ps(1.0f);
            __m256 power = exp8(_mm256_sub_ps(_mm256_setzero_ps(), gate));
            __m256 silu = _mm256_div_ps(gate, _mm256_add_ps(one, power));
            _mm256_storeu_ps(a->y + n * a->size + f, _mm256_mul_ps(silu, up));
        }
}

static void silu_and_mul(const SiluAndMul *a)
{
    share_out(silu_and_mul_of, a, a->tokens, SERIAL / a->size);
}

typedef struct {
    const float *x;
    int64_t *to;
    long stride, rows, size;
} Argmax;

static void argmax_of(const void *argument, long begin, long end)
{
    const Argmax *a = argument;
    for (long r = begin; r < end; r++) {
        const float *row = a->x + r * a->stride;
        __m256 most = _mm256_set1_ps(-INFINITY);
        long i = 0;
        for (; i + 8 <= a->size; i += 8) most = _mm256_max_ps(_mm256_loadu_ps(row + i), most);
        float best = max8(most);
        for (; i < a->size; i++) best = row[i] > best ? row[i] : best;
        a->to[r] = 0;
        for (i = 0; i < a->size; i++)
            if (row[i] == best) {
                a->to[r] = i;
                break;
            }
    }
}

/* The first of the largest values of each row. */
static void argmax(const Argmax *a)
{
    share_out(argmax_of, a, a->rows, SERIAL / a->size);
}

typedef struct {
    float *x;
    const int64_t *places;
    const int32_t *allowed;
    long stride, masks, size, words;
} Forbid;

static void forbid_of(const void *argument, long begin, long end)
{
    const Forbid *a = argument;
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (long m = begin; m < end; m++) {
        float *row = a->x + a->places[m] * a->stride;
        for (long w = 0; w < a->words; w++) {
            uint32_t forbidden = ~(uint32_t)a->allowed[m * a->words + w];
            long i = 32 * w;
            for (; forbidden && i + 8 <= a->size; i += 8, forbidden >>= 8) {
                __m256i is = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)forbidden), bit), bit);
                __m256 least = _mm256_set1_ps(-INFINITY);
                _mm256_storeu_ps(row + i, _mm256_blendv_ps(_mm256_loadu_ps(row + i), least, _mm256_castsi256_ps(is)));
            }
            for (; forbidden && i < a->size; i++, forbidden >>= 1)
                if (forbidden & 1) row[i] = -INFINITY;
        }
    }
}

/* Minus infinity in the row of each mask, at `places`, where its bit is not set. */
static void forbid(const Forbid *a)
{
    share_out(forbid_of, a, a->masks, SERIAL / a->size);
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
         linear(&(Linear){.format = (int)a[0],
                          .x = (float *)a[1],
                          .tokens = a[2],
                          .weight = (char *)a[3],
                          .inputs = a[4],
                          .outputs = a[5],
                          .bias = (float *)a[6],
                          .y = (float *)a[7]}))
FUNCTION(rotate, 6,
         rotate(&(Rotate){.x = (float *)a[0],
                          .stride = a[1],
                          .turns = (float *)a[2],
                          .tokens = a[3],
                          .heads = a[4],
                          .size = a[5]}))
FUNCTION(store, 7, store((int)a[0], (float *)a[1], a[2], (int64_t *)a[3], a[4], a[5], (void *)a[6]))
FUNCTION(silu_and_mul, 4,
         silu_and_mul(&(SiluAndMul){.gate_up = (float *)a[0], .y = (float *)a[1], .tokens = a[2], .size = a[3]}))
FUNCTION(argmax, 5,
         argmax(&(Argmax){.x = (float *)a[0], .stride = a[1], .rows = a[2], .size = a[3], .to = (int64_t *)a[4]}))
FUNCTION(forbid, 7,
         forbid(&(Forbid){.x = (float *)a[0],
                          .stride = a[1],
                          .size = a[2],
                          .places = (int64_t *)a[3],
                          .masks = a[4],
                          .allowed = (int32_t *)a[5],
                          .words = a[6]}))
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
    rms_norm(&(RmsNorm){.x = (float *)a[0],
                        .x_stride = a[1],
                        .y = (float *)a[2],
                        .y_stride = a[3],
                        .weight = (float *)a[4],
                        .rows = a[5],
                        .heads = a[6],
                        .size = a[7],
                        .eps = (float)eps});
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {METHOD(linear),       METHOD(rms_norm), METHOD(rotate), METHOD(store),
                                METHOD(silu_and_mul), METHOD(argmax),   METHOD(forbid), METHOD(decode), METHOD(prefill),
                                {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "lockstep_cpu", "The inner loops of srt/kernels/cpu.py.", -1, methods, NULL, NULL, NULL,
    NULL};

PyMODINIT_FUNC PyInit_lockstep_cpu(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}

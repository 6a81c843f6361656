/* Reductions on the host. Integers, float32 and float64 are combined as they are; narrow floats are
 * accumulated in float32 (conversions in formats.h).
 *
 * Narrow floats are rounded once, to nearest even, block by block: a block of every source is
 * widened and folded into an accumulator in the first-level cache, which is then narrowed into the
 * result. A block of the result is written after the same block of all sources has been read, so
 * the result may be the memory of any source. */

#include "formats.h"
#include "kernels.h"

#include <stdint.h>

/* Elements of a block: two blocks of float32 leave most of a first-level cache to the sources. */
enum { BLOCK = 1024 };

typedef float __attribute__((may_alias, aligned(1))) word32;

/* Of 0.0 and -0.0 the later is returned, as by NumPy on x86-64; the first NaN is kept. */
#define MINIMUM(A, B) ((A) < (B) || (A) != (A) ? (A) : (B))
#define MAXIMUM(A, B) ((A) > (B) || (A) != (A) ? (A) : (B))

#define EACH(EXPRESSION)                                                                           \
    INDEPENDENT for (size_t i = 0; i < count; i++) out[i] = EXPRESSION;                            \
    break

/* Integers wrap around, in a type that is not promoted; floats have no bitwise operations. */
#define INTEGER_CASES(WIDE)                                                                        \
    case SUM:                                                                                      \
        EACH((WIDE)a[i] + (WIDE)b[i]);                                                             \
    case PRODUCT:                                                                                  \
        EACH((WIDE)a[i] * (WIDE)b[i]);                                                             \
    case BAND:                                                                                     \
        EACH(a[i] & b[i]);                                                                         \
    case BOR:                                                                                      \
        EACH(a[i] | b[i]);                                                                         \
    case BXOR:                                                                                     \
        EACH(a[i] ^ b[i]);

#define FLOAT_CASES(WIDE)                                                                          \
    case SUM:                                                                                      \
        EACH(a[i] + b[i]);                                                                         \
    case PRODUCT:                                                                                  \
        EACH(a[i] * b[i]);

/* Any byte except 0 is true, as in NumPy. */
#define BOOL_CASES(WIDE)                                                                           \
    case BAND:                                                                                     \
        EACH((a[i] != 0) & (b[i] != 0));                                                           \
    case BOR:                                                                                      \
        EACH((a[i] != 0) | (b[i] != 0));                                                           \
    case BXOR:                                                                                     \
        EACH((a[i] != 0) ^ (b[i] != 0));

/* fold: out = left op right; out may be either operand. divide: out = out / divisor. */
#define WIDE_LOOPS(NAME, TYPE, WIDE, KIND)                                                         \
    typedef TYPE __attribute__((may_alias, aligned(1))) element_##NAME;                            \
    VECTORISED static void fold_##NAME(int operation, const void *left, const void *right,         \
                                       void *result, size_t count)                                 \
    {                                                                                              \
        const element_##NAME *a = left, *b = right;                                                \
        element_##NAME *out = result;                                                              \
        switch (operation) {                                                                       \
            KIND##_CASES(WIDE)                                                                     \
        case MIN:                                                                                  \
            EACH(MINIMUM(a[i], b[i]));                                                             \
        case MAX:                                                                                  \
            EACH(MAXIMUM(a[i], b[i]));                                                             \
        }                                                                                          \
    }                                                                                              \
    VECTORISED static void divide_##NAME(void *result, double divisor, size_t count)               \
    {                                                                                              \
        element_##NAME *out = result;                                                              \
        for (size_t i = 0; i < count; i++)                                                         \
            out[i] /= (TYPE)divisor;                                                               \
    }
WIDE_FORMATS(WIDE_LOOPS)

#define WIDE_ROW(NAME, TYPE, ...) {fold_##NAME, divide_##NAME},
static const struct {
    void (*fold)(int operation, const void *left, const void *right, void *result, size_t count);
    void (*divide)(void *result, double divisor, size_t count);
} wide_loops[FORMAT_COUNT - NARROW_COUNT] = {WIDE_FORMATS(WIDE_ROW)};

static void combine_narrow(int format, int operation, const char *const *sources, size_t n,
                           char *out, size_t count, double divisor)
{
    const size_t size = mpicoll_size(format);
    _Alignas(64) word32 accumulator[BLOCK], block[BLOCK];

    if (n == 2 && operation == SUM) {
        mpicoll_add_narrow(format, sources[0], sources[1], out, divisor, count);
        return;
    }
    for (size_t start = 0; start < count; start += BLOCK) {
        const size_t length = count - start < BLOCK ? count - start : BLOCK;
        mpicoll_widen(format, sources[0] + start * size, accumulator, length);
        for (size_t k = 1; k < n; k++) {
            mpicoll_widen(format, sources[k] + start * size, block, length);
            fold_float32(operation, accumulator, block, accumulator, length);
        }
        if (divisor != 1)
            divide_float32(accumulator, divisor, length);
        mpicoll_narrow(format, accumulator, out + start * size, length);
    }
}

static void combine_wide(int format, int operation, const char *const *sources, size_t n, char *out,
                         size_t count, double divisor)
{
    const size_t size = mpicoll_size(format), step = n > 2 ? sizeof(float[BLOCK]) / size : count;
    _Alignas(64) char accumulator[sizeof(float[BLOCK])];

    for (size_t start = 0; start < count; start += step) {
        const size_t length = count - start < step ? count - start : step, at = start * size;
        const char *left = sources[0] + at;
        if (n == 1 && left != out + at)
            mpicoll_copy(out + at, left, length * size);
        for (size_t k = 1; k < n; k++) {
            /* Only the last step may write to the result, which may be any source. */
            char *result = k == n - 1 ? out + at : accumulator;
            wide_loops[format - NARROW_COUNT].fold(operation, left, sources[k] + at, result,
                                                   length);
            left = result;
        }
        if (divisor != 1)
            wide_loops[format - NARROW_COUNT].divide(out + at, divisor, length);
    }
}

/* out = (sources[0] op sources[1] op ...) / divisor, in order; EXACT_SUM, of floats, as if in any
 * order (exact.c). There are n >= 1 sources; out may be one of them and overlaps no other source.
 */
EXPORT void mpicoll_combine(int format, int operation, const char *const *sources, size_t n,
                            char *out, size_t count, double divisor)
{
    if (operation == EXACT_SUM)
        mpicoll_exact_sum(format, sources, n, out, count, divisor);
    else if (format < NARROW_COUNT)
        combine_narrow(format, operation, sources, n, out, count, divisor);
    else
        combine_wide(format, operation, sources, n, out, count, divisor);
}

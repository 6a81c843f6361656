/* Reductions of the floats that are too narrow to accumulate in: bfloat16, float16 and float8_*,
 * but for float8_e8m0fnu, which is a scale rather than a number.
 *
 * Everything is computed in float32 and rounded once, to nearest even, block by block: a block of
 * every source is widened, folded into an accumulator that stays in the first-level cache, and
 * narrowed into the result. A block of the result is written after the same block of all sources
 * was read, so the result may be the memory of any one of them.
 *
 * The loops are branch-free and dtype-generic: a format is a handful of constants, and the compiler
 * folds them into a loop of its own for each format, and vectorises it. (It may only if it need not
 * keep floating point's exception flags: GCC wants -fno-trapping-math for that.)
 *
 * Which bits a NaN has is settled here, because hardware does not: of two NaN operands one or the
 * other passes its sign and payload on, as the compiler happened to order them, and inf - inf is
 * negative on some processors. Every NaN becomes the NaN without sign that NumPy and ml_dtypes make
 * from float32's nan. (A finite value that overflows into NaN, in formats that have no infinity,
 * keeps its sign, as there.) All other results are those of NumPy and ml_dtypes bit for bit, which
 * forbids -ffast-math.
 *
 * This is plain C for ctypes: it does not include Python.h and defines no module.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* One library for several vector units: glibc picks the version of a function when it loads it.
 * Of AVX-512, elements of 16 bits need BW and VL as well, hence whole levels of the architecture
 * where the compiler knows them. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define DISPATCH 1
#include <immintrin.h>
#if __GNUC__ >= 12
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define VECTORISED
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* Elements of a block: two blocks of float32 leave most of a first-level cache to the sources. */
enum { BLOCK = 1024 };

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define SIGN 0x80000000u
#define INFINITE 0x7f800000u /* greater magnitudes are NaN */
#define QUIET_NAN 0x7fc00000u

/* ---- Formats ---------------------------------------------------------------------------------
 *
 * All formats by name, with the bits of an element, and for the regular ones, which have a sign,
 * an exponent and a mantissa, the family, the mantissa's bits and the exponent's bias:
 *
 * IEEE: the greatest exponent means infinity and NaN.
 * FN:   finite but for the one NaN whose bits are all ones; no infinity.
 * FNUZ: the same, and zero has no sign: its negative is the NaN.
 */
enum family { IEEE, FN, FNUZ };

#define REGULAR_FORMATS(X)                                                                         \
    X(float16, 16, IEEE, 10, 15)                                                                   \
    X(float8_e3m4, 8, IEEE, 4, 3)                                                                  \
    X(float8_e4m3, 8, IEEE, 3, 7)                                                                  \
    X(float8_e4m3b11fnuz, 8, FNUZ, 3, 11)                                                          \
    X(float8_e4m3fn, 8, FN, 3, 7)                                                                  \
    X(float8_e4m3fnuz, 8, FNUZ, 3, 8)                                                              \
    X(float8_e5m2, 8, IEEE, 2, 15)                                                                 \
    X(float8_e5m2fnuz, 8, FNUZ, 2, 16)

#define FORMATS(X)                                                                                 \
    X(bfloat16, 16)                                                                                \
    REGULAR_FORMATS(X)

INLINE float widen_regular(uint32_t bits, int width, enum family family, int mantissa, int bias)
{
    const int shift = 23 - mantissa;
    const uint32_t rebias = (uint32_t)(127 - bias) << 23;
    const uint32_t one = 1u << 23;
    const uint32_t sign = 1u << (width - 1);
    const uint32_t least_normal = 1u << mantissa;
    const uint32_t infinite = sign - least_normal;
    const uint32_t magnitude = bits & (sign - 1);

    const uint32_t normal = (magnitude << shift) + rebias;
    /* A subnormal has no implicit one: lend it one, and take it back. */
    const uint32_t subnormal = bits_of(float_of(normal + one) - float_of(rebias + one));
    uint32_t wide = magnitude < least_normal ? subnormal : normal;
    wide |= (bits & sign) << (32 - width);
    switch (family) {
    case IEEE:
        return float_of(magnitude >= infinite ? wide | INFINITE : wide);
    case FN:
        return float_of(magnitude == sign - 1 ? QUIET_NAN : wide);
    default:
        return float_of(bits == sign ? QUIET_NAN : wide);
    }
}

INLINE uint32_t narrow_regular(float value, int width, enum family family, int mantissa, int bias)
{
    const int shift = 23 - mantissa;
    const uint32_t rebias = (uint32_t)(127 - bias) << 23;
    const uint32_t one = 1u << 23;
    const uint32_t sign = 1u << (width - 1);
    const uint32_t infinite = sign - (1u << mantissa);
    const uint32_t quiet = infinite | 1u << (mantissa - 1);
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & ~SIGN;
    const uint32_t signs = bits >> (32 - width) & sign;
    const int nan = magnitude > INFINITE;

    /* Add half an ulp, or a little less where a tie must fall to an even number; then truncate. */
    const uint32_t half = (1u << (shift - 1)) - 1 + (magnitude >> shift & 1);
    const uint32_t normal = (magnitude - rebias + half) >> shift;
    /* Next to this number float32 is spaced as the subnormals are, and the addition rounds. */
    const uint32_t spacer = rebias + ((uint32_t)(shift + 1) << 23);
    const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(spacer)) - spacer;
    const uint32_t rounded = magnitude < rebias + one ? subnormal : normal;

    switch (family) {
    case IEEE:
        return nan ? quiet : (rounded < infinite ? rounded : infinite) | signs;
    case FN:
        return nan ? sign - 1 : (rounded < sign - 1 ? rounded : sign - 1) | signs;
    default:
        return nan || rounded >= sign ? sign : rounded ? rounded | signs : 0;
    }
}

#define CONVERTERS(NAME, WIDTH, FAMILY, MANTISSA, BIAS)                                            \
    INLINE float widen_##NAME(uint32_t bits)                                                       \
    {                                                                                              \
        return widen_regular(bits, WIDTH, FAMILY, MANTISSA, BIAS);                                 \
    }                                                                                              \
    INLINE uint32_t narrow_##NAME(float value)                                                     \
    {                                                                                              \
        return narrow_regular(value, WIDTH, FAMILY, MANTISSA, BIAS);                               \
    }
REGULAR_FORMATS(CONVERTERS)

/* bfloat16 is the upper half of a float32. */
INLINE float widen_bfloat16(uint32_t bits)
{
    return float_of(bits << 16);
}

INLINE uint32_t narrow_bfloat16(float value)
{
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & ~SIGN) > INFINITE ? QUIET_NAN >> 16 : rounded;
}

/* ---- Loops ----------------------------------------------------------------------------------- */

/* The arrays come from elsewhere: their elements may lie at any address. */
typedef uint8_t __attribute__((may_alias)) word8;
typedef uint16_t __attribute__((may_alias, aligned(1))) word16;
typedef float __attribute__((may_alias, aligned(1))) word32;

typedef void widen_loop(const void *source, word32 *out, size_t count);
typedef void narrow_loop(const word32 *source, void *out, size_t count);

#define LOOPS(NAME, WIDTH, ...)                                                                    \
    VECTORISED static void widen_loop_##NAME(const void *source, word32 *out, size_t count)        \
    {                                                                                              \
        const word##WIDTH *restrict from = source;                                                 \
        word32 *restrict to = out;                                                                 \
        for (size_t i = 0; i < count; i++)                                                         \
            to[i] = widen_##NAME(from[i]);                                                         \
    }                                                                                              \
    VECTORISED static void narrow_loop_##NAME(const word32 *source, void *out, size_t count)       \
    {                                                                                              \
        const word32 *restrict from = source;                                                      \
        word##WIDTH *restrict to = out;                                                            \
        for (size_t i = 0; i < count; i++)                                                         \
            to[i] = (word##WIDTH)narrow_##NAME(from[i]);                                           \
    }
FORMATS(LOOPS)

#define INDEX(NAME, ...) INDEX_##NAME,
enum { FORMATS(INDEX) COUNT };

#define ROW(NAME, WIDTH, ...) {#NAME, WIDTH / 8, widen_loop_##NAME, narrow_loop_##NAME},
static struct {
    const char *name;
    size_t size;
    widen_loop *widen;
    narrow_loop *narrow;
} formats[COUNT] = {FORMATS(ROW)};

/* x86-64 has instructions for float16, but compilers do not find them in the loop above. */
#ifdef DISPATCH
#define F16C __attribute__((target("avx2,f16c")))

F16C static void widen_f16c(const void *source, word32 *out, size_t count)
{
    const word16 *from = source;
    for (; count >= 8; count -= 8, from += 8, out += 8)
        _mm256_storeu_ps((float *)out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)));
    widen_loop_float16(from, out, count);
}

F16C static void narrow_f16c(const word32 *source, void *out, size_t count)
{
    const __m256 nan = _mm256_set1_ps(float_of(QUIET_NAN));
    word16 *to = out;
    for (; count >= 8; count -= 8, source += 8, to += 8) {
        const __m256 values = _mm256_loadu_ps((const float *)source);
        const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
        const __m256 signless = _mm256_blendv_ps(values, nan, is_nan);
        _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(signless, _MM_FROUND_TO_NEAREST_INT));
    }
    narrow_loop_float16(source, to, count);
}

__attribute__((constructor)) static void choose(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) /* brings F16C along, for which older compilers cannot ask */
        return;
    formats[INDEX_float16].widen = widen_f16c;
    formats[INDEX_float16].narrow = narrow_f16c;
}
#endif

/* Of equal numbers (0.0 and -0.0) the later is taken, as by NumPy on x86-64; the first NaN stays. */
INLINE float minimum(float a, float b)
{
    return a < b || a != a ? a : b;
}

INLINE float maximum(float a, float b)
{
    return a > b || a != a ? a : b;
}

enum operation { SUM, PRODUCT, MIN, MAX };

VECTORISED static void fold(int operation, word32 *accumulator, const word32 *block, size_t count)
{
    word32 *restrict a = accumulator;
    const word32 *restrict b = block;
#define FOLD(EXPRESSION)                                                                           \
    for (size_t i = 0; i < count; i++)                                                             \
        a[i] = EXPRESSION;                                                                         \
    break
    switch (operation) {
    case SUM:
        FOLD(a[i] + b[i]);
    case PRODUCT:
        FOLD(a[i] * b[i]);
    case MIN:
        FOLD(minimum(a[i], b[i]));
    case MAX:
        FOLD(maximum(a[i], b[i]));
    }
}

VECTORISED static void divide(word32 *accumulator, float divisor, size_t count)
{
    for (size_t i = 0; i < count; i++)
        accumulator[i] /= divisor;
}

/* ---- What Python calls ----------------------------------------------------------------------- */

/* The number by which the functions below know a format, or -1. */
EXPORT int mpicoll_format(const char *name)
{
    for (int i = 0; i < COUNT; i++)
        if (!strcmp(formats[i].name, name))
            return i;
    return -1;
}

/* out = float32 of source; they do not overlap. */
EXPORT void mpicoll_widen(int format, const void *source, void *out, size_t count)
{
    formats[format].widen(source, out, count);
}

/* out = source, float32, rounded; they do not overlap. */
EXPORT void mpicoll_narrow(int format, const void *source, void *out, size_t count)
{
    formats[format].narrow(source, out, count);
}

/* out = (sources[0] op sources[1] op ...) / divisor, from the left. There are n >= 1 sources; out
 * may be one of them and overlaps the others nowhere. */
EXPORT void mpicoll_combine(int format, int operation, const char *const *sources, size_t n,
                            char *out, size_t count, float divisor)
{
    const size_t size = formats[format].size;
    _Alignas(64) word32 accumulator[BLOCK], block[BLOCK];

    for (size_t start = 0; start < count; start += BLOCK) {
        const size_t length = count - start < BLOCK ? count - start : BLOCK;
        formats[format].widen(sources[0] + start * size, accumulator, length);
        for (size_t k = 1; k < n; k++) {
            formats[format].widen(sources[k] + start * size, block, length);
            fold(operation, accumulator, block, length);
        }
        if (divisor != 1)
            divide(accumulator, divisor, length);
        formats[format].narrow(accumulator, out + start * size, length);
    }
}

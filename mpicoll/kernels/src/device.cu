/* Reductions on a CUDA device, with the same bits as reduction.py on the host.
 *
 * device_kernels.py puts formats.h before this text, and one line after it that defines the
 * requested kernel: COMBINE(...) or another macro at the end of this file. NVRTC compiles the
 * result.
 *
 * If all arrays have the same alignment, most elements are read and written in pieces of 16 bytes.
 * A thread reads a piece of all sources before it writes the result, and no other thread accesses
 * it, so a result may be the memory of any source.
 *
 * CuPy compiles everything with -ftz=true, which flushes subnormal float32 to zero. PTX
 * instructions state their own mode and are never contracted, so arithmetic and comparisons of
 * floats are written in PTX. (The conversions in formats.h are not affected.) */

#ifdef __CUDACC__
#define METHOD __device__ __forceinline__
#else
#define METHOD inline
#endif

#ifdef __CUDA_ARCH__
#define CALCULATE(PTX, LETTER, OPERATOR)                                                           \
    asm(PTX " %0, %1, %2;" : "=" LETTER(result) : LETTER(a), LETTER(b))
#else
#define CALCULATE(PTX, LETTER, OPERATOR) result = a OPERATOR b
#endif
#define ARITHMETIC(NAME, PTX, OPERATOR)                                                            \
    INLINE float NAME(float a, float b)                                                            \
    {                                                                                              \
        float result;                                                                              \
        CALCULATE(PTX ".rn.f32", "f", OPERATOR);                                                   \
        return result;                                                                             \
    }                                                                                              \
    INLINE double NAME(double a, double b)                                                         \
    {                                                                                              \
        double result;                                                                             \
        CALCULATE(PTX ".rn.f64", "d", OPERATOR);                                                   \
        return result;                                                                             \
    }
ARITHMETIC(sum, "add", +)
ARITHMETIC(difference, "sub", -)
ARITHMETIC(product, "mul", *)
ARITHMETIC(quotient, "div", /)

template <class Number> INLINE bool less(Number a, Number b)
{
    return a < b;
}

#ifdef __CUDA_ARCH__
INLINE bool less(float a, float b)
{
    int result;
    asm("{ .reg .pred p; setp.lt.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }"
        : "=r"(result)
        : "f"(a), "f"(b));
    return result;
}
#endif

/* ---- Formats ---------------------------------------------------------------------------------
 *
 * A format has an element as it is in memory, a number to compute with, the conversions between
 * them, fold, which applies an operation to two numbers, and divided, which changes only floats.
 */

/* Of equal numbers (0.0 and -0.0) the later is returned; the first NaN is kept. */
template <class Number> INLINE Number minimum(Number a, Number b)
{
    return less(a, b) || a != a ? a : b;
}

template <class Number> INLINE Number maximum(Number a, Number b)
{
    return less(b, a) || a != a ? a : b;
}

template <class Type> struct Plain {
    typedef Type element;
    typedef Type number;

    INLINE number widen(element value)
    {
        return value;
    }
    INLINE element narrow(number value)
    {
        return value;
    }
    INLINE number divided(number value, double)
    {
        return value;
    }
};

template <class Type, class Wide> struct FLOAT : Plain<Type> {
    INLINE Type divided(Type value, double divisor)
    {
        return quotient(value, (Type)divisor);
    }
    template <int operation> INLINE Type fold(Type a, Type b)
    {
        switch (operation) {
        case SUM:
            return sum(a, b);
        case PRODUCT:
            return product(a, b);
        case MIN:
            return minimum(a, b);
        default:
            return maximum(a, b);
        }
    }
};

/* Integers wrap around, in a type that arithmetic does not promote. */
template <class Type, class Wide> struct INTEGER : Plain<Type> {
    template <int operation> INLINE Type fold(Type a, Type b)
    {
        switch (operation) {
        case SUM:
            return (Type)((Wide)a + (Wide)b);
        case PRODUCT:
            return (Type)((Wide)a * (Wide)b);
        case MIN:
            return minimum(a, b);
        case MAX:
            return maximum(a, b);
        case BAND:
            return (Type)(a & b);
        case BOR:
            return (Type)(a | b);
        default:
            return (Type)(a ^ b);
        }
    }
};

/* Any byte except 0 is true. */
template <class Type, class Wide> struct BOOL : Plain<Type> {
    template <int operation> INLINE Type fold(Type a, Type b)
    {
        switch (operation) {
        case BAND:
            return (a != 0) & (b != 0);
        case BOR:
            return (a != 0) | (b != 0);
        default:
            return (a != 0) ^ (b != 0);
        }
    }
};

#define WIDE_FORMAT(NAME, TYPE, WIDE, KIND)                                                        \
    struct format_##NAME : KIND<TYPE, WIDE> {                                                      \
    };
WIDE_FORMATS(WIDE_FORMAT)

#define NARROW_FORMAT(NAME, WIDTH, ...)                                                            \
    struct format_##NAME : format_float32 {                                                        \
        typedef uint##WIDTH##_t element;                                                           \
        INLINE float widen(element bits)                                                           \
        {                                                                                          \
            return widen_##NAME(bits);                                                             \
        }                                                                                          \
        INLINE element narrow(float value)                                                         \
        {                                                                                          \
            return (element)narrow_##NAME(value);                                                  \
        }                                                                                          \
    };
FORMATS(NARROW_FORMAT)

/* ---- Pieces ----------------------------------------------------------------------------------
 *
 * The elements from `head` on form `pieces` pieces of Work::length elements each. The elements
 * before and after them, up to `count`, are processed one by one.
 */

/* Number of elements of this size in 16 bytes. */
#define LENGTH(BYTES) (16 / (int)(BYTES))

template <class Element, bool packed> struct Word {
    typedef Element type;
};

template <class Element> struct Word<Element, true> {
    typedef uint32_t type;
};

/* n elements, in words if they are smaller: else compilers unpack a piece when it is read and pack
 * it when it is written, each time. Elements are set in order. */
template <class Element, int n>
struct alignas(n > 1 ? n * sizeof(Element) : alignof(Element)) Piece {
    enum { bits = 8 * (int)sizeof(Element), packed = n > 1 && bits < 32 };
    enum { per_word = packed ? 32 / bits : 1 };
    typename Word<Element, packed>::type words[n / per_word];

    METHOD Element get(int i) const
    {
        if constexpr (packed)
            return (Element)(words[i / per_word] >> i % per_word * bits);
        else
            return words[i];
    }
    METHOD void set(int i, Element value)
    {
        if constexpr (packed) {
            const int shift = i % per_word * bits;
            const uint32_t placed = ((uint32_t)value & ~0u >> (32 - bits)) << shift;
            words[i / per_word] = shift ? words[i / per_word] | placed : placed;
        } else
            words[i] = value;
    }
};

template <int n, class Element> INLINE Piece<Element, n> *piece(Element *array, int64_t place)
{
    return (Piece<Element, n> *)(array + place);
}

template <int n, class Element>
INLINE const Piece<Element, n> *piece(const Element *array, int64_t place)
{
    return (const Piece<Element, n> *)(array + place);
}

/* Calls work.at<n>(place), for n elements from `place` on, until all elements are processed. */
template <class Work>
INLINE void each_place(const Work &work, int64_t head, int64_t pieces, int64_t count)
{
    const int64_t threads = (int64_t)gridDim.x * blockDim.x;
    const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t inside = pieces * Work::length;

    for (int64_t i = thread; i < pieces; i += threads)
        work.template at<Work::length>(head + i * Work::length);
    for (int64_t i = thread; i < count - inside; i += threads)
        work.template at<1>(i < head ? i : i + inside);
}

/* ---- Work ------------------------------------------------------------------------------------ */

/* Addresses passed by value in the kernel's arguments, which are limited to 4 KiB or 32 KiB. */
template <class Element, int capacity> struct Addresses {
    const Element *of[capacity];
};

/* ((s0 op s1) op s2 ...) / divisor, of n elements from `place` on. */
template <class Format, int operation, int n, class Sources>
INLINE Piece<typename Format::element, n> combined(const Sources &sources, int in_use,
                                                   double divisor, int64_t place)
{
    typedef typename Format::element element;
    Piece<element, n> result = *piece<n>(sources.of[0], place);
    typename Format::number numbers[n];

#pragma unroll
    for (int i = 0; i < n; i++)
        numbers[i] = Format::widen(result.get(i));
#pragma unroll(n < 8 ? 4 : 16 / n) /* loads at once; more would make the kernel too large */
    for (int k = 1; k < in_use; k++) {
        const Piece<element, n> next = *piece<n>(sources.of[k], place);
#pragma unroll
        for (int i = 0; i < n; i++)
            numbers[i] = Format::template fold<operation>(numbers[i], Format::widen(next.get(i)));
    }
    if (divisor != 1) {
#pragma unroll
        for (int i = 0; i < n; i++)
            numbers[i] = Format::divided(numbers[i], divisor);
    }
#pragma unroll
    for (int i = 0; i < n; i++)
        result.set(i, Format::narrow(numbers[i]));
    return result;
}

/* Writes the combined sources to each output. The sources come first, then the outputs, `all`
 * addresses in total. Outputs are written in pieces if `alike`: they have the alignment of the
 * sources. */
template <class Format, int operation, int capacity> struct Combine {
    typedef typename Format::element element;
    enum { length = LENGTH(sizeof(element)) };

    const Addresses<element, capacity> &addresses;
    int sources, all, alike;
    double divisor;

    template <int n> METHOD void at(int64_t place) const
    {
        const Piece<element, n> result =
            combined<Format, operation, n>(addresses, sources, divisor, place);

#pragma unroll 1
        for (int k = sources; k < all; k++) {
            element *out = (element *)addresses.of[k];

            if (alike) {
                /* With `out + place`, compilers store the elements one by one. */
                *(Piece<element, n> *)((size_t)out + place * sizeof(element)) = result;
                continue;
            }
#pragma unroll
            for (int i = 0; i < n; i++)
                out[place + i] = result.get(i);
        }
    }
};

/* out, of numbers, = source * factor */
template <class Format> struct Scale {
    typedef typename Format::element element;
    typedef typename Format::number number;
    enum { length = LENGTH(sizeof(number)) };

    const element *source;
    number factor;
    number *out;

    template <int n> METHOD void at(int64_t place) const
    {
        const Piece<element, n> given = *piece<n>(source, place);
        Piece<number, n> result;

#pragma unroll
        for (int i = 0; i < n; i++)
            result.set(i, Format::template fold<PRODUCT>(Format::widen(given.get(i)), factor));
        *piece<n>(out, place) = result;
    }
};

template <class Type> struct Complex {
    Type real, imaginary;
};

/* The same for a complex factor: each product and each sum is rounded. */
template <class Type> struct ScaleComplex {
    typedef Complex<Type> number;
    enum { length = LENGTH(sizeof(number)) };

    const number *source;
    number factor;
    number *out;

    template <int n> METHOD void at(int64_t place) const
    {
        Piece<number, n> result = *piece<n>(source, place);

#pragma unroll
        for (int i = 0; i < n; i++) {
            const Type a = result.get(i).real, b = result.get(i).imaginary;
            const Type c = factor.real, d = factor.imaginary;
            result.set(i, {difference(product(a, c), product(b, d)),
                           sum(product(a, d), product(b, c))});
        }
        *piece<n>(out, place) = result;
    }
};

/* out = source, rounded from numbers to elements */
template <class Format> struct Narrow {
    typedef typename Format::element element;
    typedef typename Format::number number;
    enum { length = LENGTH(sizeof(number)) };

    const number *source;
    element *out;

    template <int n> METHOD void at(int64_t place) const
    {
        const Piece<number, n> given = *piece<n>(source, place);
        Piece<element, n> result;

#pragma unroll
        for (int i = 0; i < n; i++)
            result.set(i, Format::narrow(given.get(i)));
        *piece<n>(out, place) = result;
    }
};

/* ---- Kernels --------------------------------------------------------------------------------- */

#define KERNEL(NAME) extern "C" __global__ void __launch_bounds__(256) NAME

/* The pieces, for each_place; the last arguments of every kernel. */
#define PLACES int64_t head, int64_t pieces, int64_t count

#define COMBINE(NAME, OPERATION, CAPACITY)                                                         \
    KERNEL(combine)                                                                                \
    (const __grid_constant__ Addresses<format_##NAME::element, CAPACITY> addresses, int sources,   \
     int all, int alike, double divisor, PLACES)                                                   \
    {                                                                                              \
        const Combine<format_##NAME, OPERATION, CAPACITY> work = {addresses, sources, all, alike,  \
                                                                  divisor};                        \
        each_place(work, head, pieces, count);                                                     \
    }

#define SCALE(NAME)                                                                                \
    KERNEL(scale)                                                                                  \
    (const format_##NAME::element *source, format_##NAME::number factor,                           \
     format_##NAME::number *out, PLACES)                                                           \
    {                                                                                              \
        const Scale<format_##NAME> work = {source, factor, out};                                   \
        each_place(work, head, pieces, count);                                                     \
    }

#define SCALE_COMPLEX(NAME)                                                                        \
    KERNEL(scale)                                                                                  \
    (const Complex<format_##NAME::number> *source, format_##NAME::number real,                     \
     format_##NAME::number imaginary, Complex<format_##NAME::number> *out, PLACES)                 \
    {                                                                                              \
        const ScaleComplex<format_##NAME::number> work = {source, {real, imaginary}, out};         \
        each_place(work, head, pieces, count);                                                     \
    }

#define NARROW(NAME)                                                                               \
    KERNEL(narrow)                                                                                 \
    (const format_##NAME::number *source, format_##NAME::element *out, PLACES)                     \
    {                                                                                              \
        const Narrow<format_##NAME> work = {source, out};                                          \
        each_place(work, head, pieces, count);                                                     \
    }

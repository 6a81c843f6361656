/* Allocations, their attributes, and memory of other processes.
 *
 * All memory lies in one reserved range of addresses. Each allocation is a shared-memory object
 * between guard pages. Freed addresses are not used again, so that late accesses fault (unless
 * EMULATED_GPU_REUSE is set).
 */
#define _GNU_SOURCE
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ARENA_BYTES ((size_t)1 << 43)
#define MAX_ALLOCATIONS ((size_t)1 << 24)
#define PAGE_BYTES ((size_t)4096)
#define GUARD_BYTES ((size_t)65536)
#define ALIGNMENT ((size_t)256)
#define GARBAGE 0xEE
#define GARBAGE_BYTES ((size_t)1 << 20) /* untouched pages use no memory */
#define CANARY 0xC5
#define MEMORY_MAGIC 0x4D454D59u

/* The allocations in the order of their addresses; reserved in full, so that they never move. */
static struct allocation *allocations;
static size_t allocation_count;
static char *arena, *arena_next;
static uint64_t next_id = 1;
static size_t used_bytes[MAX_DEVICES];
static struct allocation *registrations;

static size_t round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

static void *reserve(size_t bytes, int protection)
{
    return mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static int is_in_arena(const void *address)
{
    return arena && (char *)address >= arena && (char *)address < arena + ARENA_BYTES;
}

/* ---- the table ---- */

/* Return the number of allocations that begin at an address or below it. */
static size_t count_below(const void *address)
{
    size_t low = 0, high = allocation_count;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if ((const char *)address >= allocations[middle].address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

const struct allocation *nearest_allocation(const void *address)
{
    size_t count = count_below(address);
    const struct allocation *before = allocations + count - 1, *after = allocations + count;

    if (!is_in_arena(address) || !allocation_count)
        return NULL;
    if (count == 0 || count == allocation_count)
        return count ? before : after;
    if ((char *)address - (before->address + before->bytes) < after->address - (char *)address)
        return before;
    return after;
}

static int contains(const struct allocation *memory, const void *address)
{
    return (const char *)address >= memory->address
           && (const char *)address < memory->address + memory->bytes;
}

struct allocation *find_allocation(const void *address)
{
    struct allocation *found = registrations;

    if (is_in_arena(address)) {
        const size_t count = count_below(address);
        found = allocations + count - 1;
        return count && !found->freed && contains(found, address) ? found : NULL;
    }
    while (found && !contains(found, address))
        found = found->next;
    return found;
}

/* Return a freed entry of the same size, if addresses are to be used again. */
static struct allocation *find_reusable(size_t page_bytes)
{
    const size_t count = read_variable("EMULATED_GPU_REUSE", 0) ? allocation_count : 0;

    for (size_t k = 0; k < count; k++)
        if (allocations[k].freed && allocations[k].page_bytes == page_bytes)
            return allocations + k;
    return NULL;
}

/* Return an entry with addresses for an allocation, whose pages are not mapped yet. */
static struct allocation *add_entry(size_t bytes, size_t page_bytes)
{
    struct allocation *found;

    if (!arena) {
        arena = arena_next = reserve(ARENA_BYTES, PROT_NONE);
        allocations = reserve(MAX_ALLOCATIONS * sizeof *allocations, PROT_READ | PROT_WRITE);
        if (arena == MAP_FAILED || allocations == MAP_FAILED)
            abort();
    }
    found = find_reusable(page_bytes);
    if (!found) {
        if (allocation_count == MAX_ALLOCATIONS
            || page_bytes + 2 * GUARD_BYTES > (size_t)(arena + ARENA_BYTES - arena_next))
            return NULL;
        found = allocations + allocation_count;
        *found = (struct allocation){.pages = arena_next + GUARD_BYTES, .page_bytes = page_bytes};
        arena_next = found->pages + page_bytes;
    }
    /* The end of the memory is the end of its pages. */
    found->address = found->pages + page_bytes - round_up(bytes, ALIGNMENT);
    found->bytes = bytes;
    found->freed = 1;
    found->id = next_id++;
    allocation_count += found == allocations + allocation_count;
    return found;
}

/* ---- mapping ---- */

static void fill(const struct allocation *memory)
{
    char *end = memory->address + memory->bytes;

    memset(memory->pages, CANARY, (size_t)(memory->address - memory->pages));
    memset(memory->address, GARBAGE,
           memory->bytes < GARBAGE_BYTES ? memory->bytes : GARBAGE_BYTES);
    memset(end, CANARY, (size_t)(memory->pages + memory->page_bytes - end));
}

static int is_filled(const char *begin, const char *end)
{
    for (; begin < end; begin++)
        if (*begin != (char)CANARY) {
            report_access("earlier write outside of the allocation", begin);
            return 0;
        }
    return 1;
}

static int has_intact_canary(const struct allocation *memory)
{
    const char *end = memory->address + memory->bytes;
    return is_filled(memory->pages, memory->address)
           && is_filled(end, memory->pages + memory->page_bytes);
}

static cudaError_t allocate(void **address, size_t bytes, int device, enum memory_kind kind)
{
    size_t page_bytes = round_up(bytes, PAGE_BYTES);
    size_t used = kind == PINNED_MEMORY ? 0 : page_bytes;
    struct allocation *made;

    *address = NULL;
    if (!bytes)
        return cudaSuccess;
    if (bytes > ARENA_BYTES / 2 || (used && used_bytes[device] + used > MEMORY_BYTES))
        return cudaErrorMemoryAllocation;
    made = add_entry(bytes, page_bytes);
    if (!made || create_object(made->id, page_bytes, made->pages) == MAP_FAILED)
        return cudaErrorMemoryAllocation;
    made->device = device, made->kind = kind;
    made->process = getpid(), made->object = made->id;
    fill(made);
    made->freed = 0;
    used_bytes[device] += used;
    *address = made->address;
    return cudaSuccess;
}

static void unmap_allocation(struct allocation *found)
{
    mmap(found->pages, found->page_bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    found->freed = 1;
}

/* Free memory. */
static cudaError_t release(struct allocation *found)
{
    cudaError_t error = has_intact_canary(found) ? cudaSuccess : cudaErrorIllegalAddress;

    if (error)
        set_device_error(found->device, error);
    unmap_allocation(found);
    delete_object(found->object);
    if (found->kind != PINNED_MEMORY)
        used_bytes[found->device] -= found->page_bytes;
    return error;
}

/* ---- runtime ---- */

void *allocate_variables(size_t bytes)
{
    void *address;
    allocate(&address, bytes, current_device(), DEVICE_MEMORY);
    return address;
}

static cudaError_t allocate_now(void **address, size_t bytes, enum memory_kind kind)
{
    BEGIN_CALL;
    CHECK(check_capture_safe());
    return failed(allocate(address, bytes, current_device(), kind));
}

EXPORT cudaError_t cudaMalloc(void **address, size_t bytes)
{
    return allocate_now(address, bytes, DEVICE_MEMORY);
}

EXPORT cudaError_t cudaMallocManaged(void **address, size_t bytes, unsigned flags)
{
    (void)flags;
    return allocate_now(address, bytes, MANAGED_MEMORY);
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags)
{
    (void)flags;
    return allocate_now(address, bytes, PINNED_MEMORY);
}

/* Find the allocation that begins at an address and has one of the kinds, given as bits. */
static cudaError_t find_start(struct allocation **found, void *address, unsigned kinds)
{
    *found = find_allocation(address);
    if (*found && (*found)->pages && (*found)->address == address && kinds >> (*found)->kind & 1)
        return cudaSuccess;
    report_access("free of memory that cannot be freed so", address);
    return cudaErrorInvalidValue;
}

/* Free memory once the work of all devices is done, because any device may use it. */
static cudaError_t free_now(void *address, unsigned kinds)
{
    BEGIN_CALL;
    struct allocation *found;

    CHECK(check_capture_safe());
    if (!address)
        return cudaSuccess;
    CHECK(find_start(&found, address, kinds));
    run_all_devices();
    CHECK(release(found));
    return failed(device_error(current_device()));
}

EXPORT cudaError_t cudaFree(void *address)
{
    return free_now(address, 1 << DEVICE_MEMORY | 1 << MANAGED_MEMORY | 1 << ASYNC_MEMORY);
}

EXPORT cudaError_t cudaFreeHost(void *address)
{
    return free_now(address, 1 << PINNED_MEMORY);
}

EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    BEGIN_CALL;
    *total = MEMORY_BYTES;
    *available = *total - used_bytes[current_device()];
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags)
{
    BEGIN_CALL;
    struct allocation *made, *other = registrations;

    (void)flags;
    CHECK(check_capture_safe());
    if (!address || !bytes)
        return failed(cudaErrorInvalidValue);
    while (other && !(other->address < (char *)address + bytes
                      && (char *)address < other->address + other->bytes))
        other = other->next;
    if (is_in_arena(address) || other)
        return failed(cudaErrorHostMemoryAlreadyRegistered);
    made = malloc(sizeof *made);
    *made = (struct allocation){.address = address, .bytes = bytes, .kind = PINNED_MEMORY,
                                .device = current_device(), .id = next_id++,
                                .next = registrations};
    registrations = made;
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *address)
{
    BEGIN_CALL;
    struct allocation *found, **link = &registrations;

    CHECK(check_capture_safe());
    run_all_devices();
    while (*link && (*link)->address != address)
        link = &(*link)->next;
    found = *link;
    if (!found)
        return failed(cudaErrorHostMemoryNotRegistered);
    *link = found->next;
    free(found);
    return cudaSuccess;
}

/* ---- stream-ordered memory ---- */

static cudaError_t run_allocation(void *argument)
{
    struct allocation *memory = *(struct allocation **)argument;
    mprotect(memory->pages, memory->page_bytes, PROT_READ | PROT_WRITE);
    return cudaSuccess;
}

static cudaError_t run_free(void *argument)
{
    HOLD_DEVICE;
    return release(*(struct allocation **)argument);
}

EXPORT cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t handle)
{
    HOLD_DEVICE;
    struct allocation *made;
    struct stream *stream;

    CHECK(begin_stream_call(handle, &stream));
    CHECK(allocate(address, bytes, current_device(), ASYNC_MEMORY));
    if (!bytes)
        return cudaSuccess;
    made = find_allocation(*address);
    /* No stream may access it before the stream has reached the allocation. */
    mprotect(made->pages, made->page_bytes, PROT_NONE);
    return failed(enqueue(stream, (struct work){run_allocation, &made, sizeof made, ALWAYS}));
}

EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t handle)
{
    HOLD_DEVICE;
    struct allocation *found;
    struct stream *stream;

    CHECK(begin_stream_call(handle, &stream));
    if (!address)
        return cudaSuccess;
    CHECK(find_start(&found, address, 1 << ASYNC_MEMORY | 1 << DEVICE_MEMORY));
    return failed(enqueue(stream, (struct work){run_free, &found, sizeof found, ALWAYS}));
}

/* ---- memory of other processes ---- */

struct memory_handle {
    uint32_t magic;
    int machine_device, process;
    uint64_t object;
    size_t bytes, page_bytes;
    char *address;
};

EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *address)
{
    BEGIN_CALL;
    const struct allocation *found = find_allocation(address);
    struct memory_handle text;

    if (!found || found->kind != DEVICE_MEMORY)
        return failed(cudaErrorInvalidValue);
    text = (struct memory_handle){MEMORY_MAGIC, machine_device(found->device), getpid(),
                                  found->object, found->bytes, found->page_bytes, found->address};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &text, sizeof text);
    return cudaSuccess;
}

/* Return an open import that has the same address in the exporting process, or NULL. */
static struct allocation *find_import(const struct memory_handle *text)
{
    for (struct allocation *each = allocations; each < allocations + allocation_count; each++)
        if (each->kind == IMPORTED_MEMORY && !each->freed && each->process == text->process
            && each->exported_address == text->address)
            return each;
    return NULL;
}

/* Map memory of another process. Returns NULL if the memory was freed. */
static struct allocation *import(const struct memory_handle *text, int device)
{
    struct allocation *made = add_entry(text->bytes, text->page_bytes);

    if (!made
        || open_object(text->process, text->object, made->page_bytes, made->pages) == MAP_FAILED)
        return NULL;
    made->device = device, made->kind = IMPORTED_MEMORY;
    made->process = text->process, made->object = text->object;
    made->exported_address = text->address;
    made->references = made->freed = 0;
    return made;
}

EXPORT cudaError_t cudaIpcOpenMemHandle(void **address, cudaIpcMemHandle_t handle, unsigned flags)
{
    BEGIN_CALL;
    struct memory_handle text;
    struct allocation *found;
    int device;

    memcpy(&text, &handle, sizeof text);
    if (text.magic != MEMORY_MAGIC || flags != cudaIpcMemLazyEnablePeerAccess)
        return failed(cudaErrorInvalidValue);
    if (text.process == getpid())
        return failed(cudaErrorDeviceUninitialized);
    CHECK(check_capture_safe());
    device = visible_device(text.machine_device);
    if (device < 0)
        return failed(cudaErrorInvalidDevice);
    found = find_import(&text);
    if (found && found->object != text.object)
        return failed(cudaErrorAlreadyMapped); /* memory that has the address of freed memory */
    found = found ? found : import(&text, device);
    if (!found)
        return failed(cudaErrorInvalidValue);
    found->references++;
    *address = found->address;
    return cudaSuccess;
}

/* As in CUDA, the device is not synchronized: later accesses fault. */
EXPORT cudaError_t cudaIpcCloseMemHandle(void *address)
{
    BEGIN_CALL;
    struct allocation *found = find_allocation(address);

    if (!found || found->kind != IMPORTED_MEMORY || found->address != address)
        return failed(cudaErrorInvalidValue);
    if (--found->references == 0)
        unmap_allocation(found);
    return cudaSuccess;
}

/* ---- attributes of pointers ---- */

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found,
                                            const void *address)
{
    static const enum cudaMemoryType types[] = {
        [DEVICE_MEMORY] = cudaMemoryTypeDevice,   [MANAGED_MEMORY] = cudaMemoryTypeManaged,
        [ASYNC_MEMORY] = cudaMemoryTypeDevice,    [PINNED_MEMORY] = cudaMemoryTypeHost,
        [IMPORTED_MEMORY] = cudaMemoryTypeDevice,
    };
    HOLD_DEVICE;
    const struct allocation *memory = find_allocation(address);
    const enum cudaMemoryType type = memory ? types[memory->kind] : cudaMemoryTypeUnregistered;

    *found = (struct cudaPointerAttributes){
        .type = type, .device = memory ? memory->device : cudaInvalidDeviceId,
        .devicePointer = memory ? (void *)address : NULL,
        .hostPointer = type == cudaMemoryTypeDevice ? NULL : (void *)address,
    };
    return failed(ensure_context());
}

static CUresult write_attribute(void *value, CUpointer_attribute attribute,
                                const struct allocation *memory)
{
    int type = memory->kind == PINNED_MEMORY ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    const struct {
        CUpointer_attribute attribute;
        size_t bytes;
        uint64_t value;
    } rows[] = {
        {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 4, type},
        {CU_POINTER_ATTRIBUTE_BUFFER_ID, 8, memory->id},
        {CU_POINTER_ATTRIBUTE_IS_MANAGED, 4, memory->kind == MANAGED_MEMORY},
        {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 4, (unsigned)memory->device},
        {CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, 4, memory->kind == DEVICE_MEMORY},
        {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 8, (uint64_t)memory->address},
        {CU_POINTER_ATTRIBUTE_RANGE_SIZE, 8, memory->bytes},
        {CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, 8, memory->kind == ASYNC_MEMORY}, /* any number */
    };

    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++)
        if (rows[k].attribute == attribute) {
            memcpy(value, &rows[k].value, rows[k].bytes);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute,
                                      CUdeviceptr address)
{
    HOLD_DEVICE;
    const struct allocation *memory = find_allocation((void *)address);
    return memory ? write_attribute(value, attribute, memory) : CUDA_ERROR_INVALID_VALUE;
}

/* As in CUDA, unknown memory is not an error, and its attributes are zero. */
EXPORT CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes,
                                       void **values, CUdeviceptr address)
{
    static const struct allocation unknown = {.kind = PINNED_MEMORY, .device = cudaInvalidDeviceId};
    HOLD_DEVICE;
    const struct allocation *memory = find_allocation((void *)address);

    for (unsigned k = 0; k < count; k++)
        write_attribute(values[k], attributes[k], memory ? memory : &unknown);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device_address, void *address,
                                             unsigned flags)
{
    HOLD_DEVICE;
    const struct allocation *memory = find_allocation(address);

    (void)flags;
    *device_address = (CUdeviceptr)address;
    return memory && memory->kind == PINNED_MEMORY ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

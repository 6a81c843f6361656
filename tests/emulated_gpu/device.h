/* An emulated CUDA device over host memory: the interface between its parts.
 *
 * Work in a stream is queued, and runs only when something waits for it: as late as CUDA allows.
 * A missing wait therefore always reads old data.
 *
 * Environment variables:
 *   EMULATED_GPU_DEVICES          number of devices of the machine (default 2)
 *   CUDA_VISIBLE_DEVICES          devices that the process sees, by number ("1,0")
 *   EMULATED_GPU_PEERS            pairs of devices with peer access ("0-1,2-3"; default: all pairs)
 *   EMULATED_GPU_MEMORY_BYTES     memory of a device for each process (default 16 GiB)
 *   EMULATED_GPU_MULTIPROCESSORS  number of multiprocessors of a device (default 4)
 *   EMULATED_GPU_PROTECTION       0: the host and all devices may access any memory of a device
 *   EMULATED_GPU_REUSE            1: a new allocation gets the address of a freed one of its size
 */
#ifndef DEVICE_H
#define DEVICE_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 16

/* contexts.c: devices, the context stack of each thread, error state. */

long read_variable(const char *name, long otherwise);
int visible_device_count(void);
/* Convert between a device's number in this process and its number on the machine. `visible_device`
 * returns -1 for a device that the process does not see. */
int machine_device(int device);
int visible_device(int machine_device);
int has_peer_access(int device, int peer);
int current_device(void);
/* Make the primary context of the current device current, if none is (the runtime API does). */
cudaError_t ensure_context(void);
/* Begin a runtime call that uses the device: ensure a context, and return the sticky error of the
 * device, or the error of a call that is not allowed on this thread. */
cudaError_t begin_call(void);
/* Set the thread's last runtime error unless it is cudaSuccess, and return it. */
cudaError_t failed(cudaError_t error);
/* The sticky error of a device. The first error is kept. */
cudaError_t device_error(int device);
void set_device_error(int device, cudaError_t error);
/* Make a device's primary context current on this thread until pop_device. */
void push_device(int device);
void pop_device(void);

/* memory.c: allocations and their attributes. */

enum memory_kind { DEVICE_MEMORY, MANAGED_MEMORY, ASYNC_MEMORY, PINNED_MEMORY, IMPORTED_MEMORY };

struct allocation {
    char *address;
    size_t bytes;
    int device;
    enum memory_kind kind;
    int freed;
    uint64_t id;

    /* The pages that hold it, and the process and number that name its shared-memory object. */
    char *pages;
    size_t page_bytes;
    int process;
    uint64_t object;
    char *exported_address; /* IMPORTED_MEMORY: its address in that process */
    int references;         /* IMPORTED_MEMORY: number of calls that opened it */
};

/* Return the allocation that contains an address or lies nearest to it, freed ones included; NULL
 * if the address is in no memory of the emulated devices. Safe in a signal handler. */
const struct allocation *nearest_allocation(const void *address);
/* Return the allocation or registered host memory that contains an address, or NULL. */
struct allocation *find_allocation(const void *address);
/* The table of allocations, for loops. */
struct allocation *first_allocation(void);
struct allocation *end_of_allocations(void);
/* Allocate memory of the current device for a module's variables; NULL if it is out of memory. */
void *allocate_variables(size_t bytes);
/* Map memory of another process. `handle` holds its process, object, sizes and device. Returns
 * NULL if the memory was freed. */
struct allocation *import_allocation(const struct allocation *handle);
/* Close the mapping of an import. */
void unmap_allocation(struct allocation *found);

/* protection.c: which device's memory a thread may access. */

#define ALL_DEVICES (~0u)

/* Let only the threads that allow it access the pages of an allocation. */
void protect_memory(const struct allocation *memory);
/* Set the devices whose memory this thread may access, a bit for each. Returns the previous ones. */
unsigned allow_access(unsigned devices);
/* Let kernels of a device access memory of a peer. */
void enable_peer(int device, int peer);
/* Return the devices whose memory the kernels of a device may access. */
unsigned accessible_from(int device);

/* shared_objects.c: shared-memory objects, which other processes open by process and number. */

#define EVENT_TABLE 0 /* number of the object with the counts of a process's events */

/* Map an object at `place` (NULL: anywhere). Returns MAP_FAILED if it does not exist. */
void *create_object(uint64_t number, size_t bytes, void *place, int protection);
void *open_object(int process, uint64_t number, size_t bytes, void *place);
/* Delete an object of this process. Later accesses by other processes raise SIGBUS. */
void delete_object(uint64_t number);

/* faults.c: invalid accesses of running work. */

/* Run work. Returns its error, or the CUDA error for a signal such as SIGSEGV, which is reported
 * with the allocation that was accessed. */
cudaError_t run_guarded(cudaError_t (*run)(void *argument), void *argument);
/* Name the work that the thread runs, for reports. The string must outlive the work. */
void describe_work(const char *description);
/* Report memory that was written outside its allocation or freed too early. */
void report_access(const char *access, const void *address);

/* streams.c: queues of commands. */

enum work_flags {
    SPINS = 1,       /* waits for memory that other devices write: it starts soon, unasked */
    SAME_DEVICE = 2, /* the stream must belong to the current device, as for kernels */
    ALWAYS = 4,      /* the work also runs after a device error; a graph cannot contain it */
    UNGUARDED = 8,   /* catches faults itself */
};

/* Add work to a stream or, during capture, to its graph. `argument` (`bytes` long) is copied.
 * `run` may be called in any thread, with the stream's device current. An error that it returns
 * is sticky: every later call on the device returns it. */
cudaError_t enqueue(cudaStream_t stream, cudaError_t (*run)(void *argument), const void *argument,
                    size_t bytes, unsigned flags);

/* A place in a stream: the number of its commands up to there. */
struct place {
    struct stream *stream;
    uint64_t number;
};

struct stream {
    uint32_t magic; /* first: a stale handle is refused */
    int device;
    unsigned flags;
    int is_legacy, is_destroyed;
    struct stream *next;

    struct command *first, *last;
    uint64_t enqueued, done;
    int is_running;          /* a thread runs the first command */
    uint64_t legacy_seen;    /* latest place of the legacy stream that this stream waits for */
    uint64_t seen_by_legacy; /* latest place of this stream that the legacy stream waits for */
    uint64_t start_place;    /* the starter thread runs commands up to here */
    int has_starter;
    unsigned queries;

    struct capture *capture; /* NULL: not capturing */
    unsigned *tips;          /* the latest captured nodes, on which the next one depends */
    size_t tip_count;
};

/* One mutex protects all state of the device. It is not held while commands run. */
void lock_device(void);
void unlock_device(void);
/* Return a stream by its handle, or NULL. The mutex must be held, as for all functions below whose
 * comments do not say otherwise. */
struct stream *find_stream(cudaStream_t handle);
struct stream *first_stream(void);
/* Add a command. `run` may be NULL. Returns its place. */
struct place append(struct stream *stream, cudaError_t (*run)(void *), const void *argument,
                    size_t bytes, unsigned flags);
/* Add a command that waits for a place in another stream. */
void append_wait(struct stream *stream, struct place place);
/* Add a command to a stream, or to the graph that it captures. */
cudaError_t append_or_capture(struct stream *stream, cudaError_t (*run)(void *),
                              const void *argument, size_t bytes, unsigned flags);
int is_done(struct place place);
/* Run the commands of a stream up to a place. The mutex must not be held. */
void run_until(struct place place);
/* Run all commands of a device. The mutex must not be held. */
void run_device(int device);
/* Run commands up to a place in another thread, after a delay in nanoseconds. */
void start_later(struct place place, long delay_ns);
/* Count a query of an incomplete place. After some queries its commands start. */
void count_query(struct place place, unsigned *queries);

/* graphs.c: capture and graphs. */

enum capture_state { NOT_CAPTURING, CAPTURING, CAPTURE_INVALIDATED };

/* Return an error if a capture forbids a call such as cudaMalloc on this thread, and invalidate
 * that capture. The mutex must not be held. */
cudaError_t check_capture_safe(void);
/* Return an error for an illegal call on a capturing stream, and invalidate its capture. */
cudaError_t refuse_if_capturing(struct stream *stream, cudaError_t error);
/* Return cudaErrorStreamCaptureImplicit if the legacy stream would wait for a captured stream. */
cudaError_t check_legacy_capture(struct stream *stream);
/* End the capture of a stream that is destroyed. */
void abandon_capture(struct stream *stream);
cudaError_t capture_work(struct stream *stream, cudaError_t (*run)(void *), const void *argument,
                         size_t bytes, unsigned flags);
/* Events recorded in a capture: a copy of the stream's latest nodes. */
struct captured_tips {
    struct capture *capture;
    unsigned *tips;
    size_t tip_count;
};
cudaError_t capture_record(struct stream *stream, struct captured_tips *tips);
cudaError_t capture_wait(struct stream *stream, const struct captured_tips *tips);
cudaError_t refuse_captured_event(const struct captured_tips *tips);
void release_tips(struct captured_tips *tips);

/* ipc.c: events of other processes. */

/* Counts in shared memory: records enqueued, and the latest record that is complete. */
struct event_counts {
    _Atomic uint64_t recorded, completed;
};

/* Return counts for a new shared event, and its number. */
struct event_counts *create_counts(uint64_t *number);
struct event_counts *open_counts(int process, uint64_t number);
/* Note that a record is in a stream, so that other processes can ask for it. */
void add_shared_record(uint64_t number, uint64_t record, struct place place);
void remove_shared_record(uint64_t number, uint64_t record);
/* Wait for a record of another process's event. The mutex must not be held. */
void await_record(int process, uint64_t number, struct event_counts *counts, uint64_t record);
/* Ask a process to run the stream that a record is in. Returns 0 if the process has ended. */
int request_record(int process, uint64_t number, uint64_t record);

#endif

/* Capture of streams into graphs, and graphs. A capture has one stream: events add no others. */
#include "device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define GRAPH_MAGIC 0x6A6FA9u

struct node {
    run_function *run;
    void *argument;
    unsigned flags;
};

/* Nodes in the order of their capture. A handle of a graph, its executable graphs and their pending
 * launches share it. */
struct graph {
    uint32_t magic;
    int references;
    int device;
    struct node *nodes;
    size_t node_count;
};

struct executable {
    uint32_t magic;
    struct graph *graph;
    struct place latest; /* launches of one executable graph run one after another */
};

struct capture {
    struct graph *graph;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    int is_invalid;
    struct capture *next;
};

static struct capture *captures; /* in progress */
static _Thread_local enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static void release_graph(struct graph *graph)
{
    if (--graph->references)
        return;
    for (size_t k = 0; k < graph->node_count; k++)
        free(graph->nodes[k].argument);
    free(graph->nodes);
    graph->magic = 0;
    free(graph);
}

/* ---- rules ---- */

cudaError_t refuse_if_capturing(struct stream *stream, cudaError_t error)
{
    if (!stream->capture)
        return cudaSuccess;
    if (stream->capture->is_invalid)
        return cudaErrorStreamCaptureInvalidated;
    stream->capture->is_invalid = 1;
    return error;
}

/* Return whether a capture forbids unsafe calls on this thread. */
static int forbids(const struct capture *capture)
{
    if (thread_mode == cudaStreamCaptureModeRelaxed
        || capture->mode == cudaStreamCaptureModeRelaxed)
        return 0;
    if (pthread_equal(capture->thread, pthread_self()))
        return 1;
    return thread_mode == cudaStreamCaptureModeGlobal
           && capture->mode == cudaStreamCaptureModeGlobal;
}

cudaError_t check_capture_safe(void)
{
    cudaError_t error = cudaSuccess;

    for (struct capture *each = captures; each; each = each->next)
        if (forbids(each)) {
            each->is_invalid = 1;
            error = cudaErrorStreamCaptureUnsupported;
        }
    return error;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CUstreamCaptureMode before = (CUstreamCaptureMode)thread_mode;

    if ((unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    thread_mode = (enum cudaStreamCaptureMode)*mode;
    *mode = before;
    return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    return failed((cudaError_t)cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode *)mode));
}

/* ---- capture ---- */

cudaError_t capture_work(struct stream *stream, struct work work)
{
    struct graph *graph = stream->capture->graph;
    void *argument;

    if (stream->capture->is_invalid)
        return cudaErrorStreamCaptureInvalidated;
    if (work.flags & ALWAYS)
        return refuse_if_capturing(stream, cudaErrorStreamCaptureUnsupported);
    argument = malloc(work.bytes + 1);
    if (work.bytes)
        memcpy(argument, work.argument, work.bytes);
    graph->nodes = realloc(graph->nodes, (graph->node_count + 1) * sizeof *graph->nodes);
    graph->nodes[graph->node_count++] = (struct node){work.run, argument, work.flags};
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode)
{
    HOLD_DEVICE;
    struct stream *stream;

    CHECK(begin_stream_call(handle, &stream));
    if (stream->is_legacy)
        return failed(cudaErrorStreamCaptureUnsupported);
    if (stream->capture)
        return failed(cudaErrorIllegalState);
    stream->capture = malloc(sizeof *captures);
    *stream->capture = (struct capture){calloc(1, sizeof(struct graph)), mode, pthread_self(), 0,
                                        captures};
    *stream->capture->graph =
        (struct graph){.magic = GRAPH_MAGIC, .references = 1, .device = stream->device};
    captures = stream->capture;
    return cudaSuccess;
}

/* Return the captured graph, or NULL if the capture is invalid. */
static struct graph *end_capture(struct stream *stream)
{
    struct capture *capture = stream->capture, **link = &captures;
    struct graph *graph = capture->graph;

    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    stream->capture = NULL;
    if (capture->is_invalid) {
        release_graph(graph);
        graph = NULL;
    }
    free(capture);
    return graph;
}

void abandon_capture(struct stream *stream)
{
    if (refuse_if_capturing(stream, cudaErrorStreamCaptureInvalidated))
        end_capture(stream);
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph)
{
    HOLD_DEVICE;
    struct stream *stream;

    *graph = NULL;
    CHECK(begin_stream_call(handle, &stream));
    if (!stream->capture)
        return failed(cudaErrorIllegalState);
    if (stream->capture->mode != cudaStreamCaptureModeRelaxed
        && !pthread_equal(stream->capture->thread, pthread_self()))
        return failed(cudaErrorStreamCaptureWrongThread);
    *graph = (cudaGraph_t)end_capture(stream);
    return failed(*graph ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status)
{
    HOLD_DEVICE;
    struct stream *stream;

    *status = cudaStreamCaptureStatusNone;
    CHECK(begin_stream_call(handle, &stream));
    if (stream->capture)
        *status = stream->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                              : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream,
                                            enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *count)
{
    cudaError_t error = cudaStreamIsCapturing(stream, status);

    (void)id, (void)graph, (void)nodes, (void)edges, (void)count;
    return error || *status == cudaStreamCaptureStatusNone ? error : failed(cudaErrorNotSupported);
}

/* ---- graphs ---- */

static cudaError_t run_graph(void *argument)
{
    struct graph *graph = *(struct graph **)argument;
    cudaError_t error = cudaSuccess;

    for (size_t k = 0; k < graph->node_count && !error; k++) {
        const struct node *node = graph->nodes + k;
        error = run_work(graph->device, node->run, node->argument, node->flags);
    }
    HOLD_DEVICE;
    release_graph(graph);
    return error;
}

/* Return a graph or an executable graph, which begin alike, or NULL if the handle is neither. */
static void *find_graph(void *handle)
{
    uint32_t *magic = handle;
    return magic && *magic == GRAPH_MAGIC ? handle : NULL;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *handle, cudaGraph_t graph_handle,
                                        unsigned long long flags)
{
    BEGIN_CALL;
    struct graph *graph = find_graph(graph_handle);
    struct executable *made;

    (void)flags;
    if (!graph)
        return failed(cudaErrorInvalidValue);
    made = malloc(sizeof *made);
    *made = (struct executable){GRAPH_MAGIC, graph, {0}};
    graph->references++;
    *handle = (cudaGraphExec_t)made;
    return cudaSuccess;
}

/* The command waits for the previous launch. It catches faults by node, not as a whole. */
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle)
{
    HOLD_DEVICE;
    struct executable *executable = find_graph(handle);
    struct work work = {run_graph, NULL, sizeof executable->graph, UNGUARDED};
    struct stream *stream;

    CHECK(begin_stream_call(stream_handle, &stream));
    if (!executable)
        return failed(cudaErrorInvalidValue);
    work.argument = &executable->graph;
    for (size_t k = 0; k < executable->graph->node_count; k++)
        work.flags |= executable->graph->nodes[k].flags & SPINS;
    CHECK(refuse_if_capturing(stream, cudaErrorNotSupported)); /* not implemented */
    if (executable->latest.stream)
        append_wait(stream, executable->latest);
    CHECK(enqueue(stream, work));
    executable->graph->references++;
    executable->latest = end_of(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t handle)
{
    HOLD_DEVICE;
    struct graph *graph = find_graph(handle);

    if (!graph)
        return failed(cudaErrorInvalidValue);
    release_graph(graph);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle)
{
    HOLD_DEVICE;
    struct executable *executable = find_graph(handle);

    if (!executable)
        return failed(cudaErrorInvalidValue);
    release_graph(executable->graph);
    executable->magic = 0;
    free(executable);
    return cudaSuccess;
}

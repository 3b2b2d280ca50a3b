/* A libcuda that can do nothing but double forty numbers: so a test can pass real
   arguments through NVIDIA's own bindings, and see how they arrive in C. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *handle;
typedef uint64_t address;
#define CONTEXT ((handle)0x1234)
#define STREAM ((handle)0x5678)
#define MODULE ((handle)0x9abc)
#define KERNEL ((handle)0xdef0)
#define GRAPH ((handle)0x1111)
#define GRAPH_EXEC ((handle)0x2222)
#define EVENT ((handle)0x3333)
#define CHECK(condition) if (!(condition)) return 400

static int capturing, count;
static struct { address source, target; } captured[100];

/* What is alive: memory by address, contexts that are current, graphs and so on by kind. */
enum { BLOCKS = 1000 };
static struct { address start; size_t size; } blocks[BLOCKS];
static int current, modules, graphs, execs, events;

static int inside(address place, size_t size) {
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].start && place >= blocks[i].start
            && place + size <= blocks[i].start + blocks[i].size) return 1;
    return 0;
}

int stubLeft(void) {
    int memory = 0;
    for (int i = 0; i < BLOCKS; i++) memory += blocks[i].start != 0;
    return memory + 1000 * current + 10000 * modules + 100000 * (graphs + execs + events);
}

static int twice(address source, address target) {
    for (int i = 0; i < 40; i++) ((float *)target)[i] = 2 * ((float *)source)[i];
    return 0;
}

int cuInit(unsigned flags) { return flags; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *devices) { *devices = 1; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    memset(name, 0, size);
    strcpy(name, "a stub");
    return device;
}
int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 75 ? 9 : which == 76 ? 0 : which == 16 ? 132 : which == 97 ? 232448 : -1;
    return device;
}
int cuDevicePrimaryCtxRetain(handle *context, int device) { *context = CONTEXT; return device; }
int cuCtxPushCurrent(handle context) { CHECK(context == CONTEXT); current++; return 0; }
int cuCtxPopCurrent(handle *context) { CHECK(current-- > 0); *context = CONTEXT; return 0; }
int cuStreamCreate(handle *stream, unsigned flags) { *stream = STREAM; return flags != 1; }
int cuStreamSynchronize(handle stream) { CHECK(stream == STREAM); return 0; }
int cuMemAlloc(address *place, size_t size) {
    CHECK(current && size);
    *place = (address)aligned_alloc(512, size);
    for (int i = 0; i < BLOCKS; i++)
        if (!blocks[i].start) {
            blocks[i].start = *place;
            blocks[i].size = size;
            return 0;
        }
    return 2;
}
int cuMemFree(address place) {
    for (int i = 0; i < BLOCKS; i++)
        if (place && blocks[i].start == place) {
            blocks[i].start = 0;
            free((void *)place);
            return 0;
        }
    return 1; /* freed twice, or never ours */
}
int cuMemGetInfo(size_t *left, size_t *total) { *left = 100; *total = 200; return 0; }
int cuMemcpyHtoDAsync(address to, const void *from, size_t size, handle stream) {
    CHECK(stream == STREAM && current && inside(to, size));
    memcpy((void *)to, from, size);
    return 0;
}
int cuMemcpyDtoHAsync(void *to, address from, size_t size, handle stream) {
    CHECK(stream == STREAM && current && inside(from, size));
    memcpy(to, (void *)from, size);
    return 0;
}
int cuMemcpyDtoDAsync(address to, address from, size_t size, handle stream) {
    CHECK(stream == STREAM && current && inside(from, size) && inside(to, size));
    memcpy((void *)to, (void *)from, size);
    return 0;
}
int cuModuleLoadDataEx(handle *module, const char *text, unsigned options, int *names,
                       void **values) {
    CHECK(options == 2 && names[0] == 5 && names[1] == 6 && (uintptr_t)values[1] == 2000);
    *module = MODULE;
    if (!strstr(text, "BROKEN")) return modules++, 0;
    strcpy(values[0], "ptxas fatal: it is\nbroken");
    return 218;
}
int cuModuleUnload(handle module) { CHECK(module == MODULE && modules-- > 0); return 0; }
int cuModuleGetFunction(handle *kernel, handle module, const char *name) {
    CHECK(module == MODULE);
    *kernel = KERNEL;
    return strcmp(name, "double_kernel") ? 500 : 0;
}
int cuFuncSetAttribute(handle kernel, int which, int value) {
    CHECK(kernel == KERNEL && which == 8);
    return value != 60000;
}
int cuLaunchKernel(handle kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                   unsigned by, unsigned bz, unsigned shared, handle stream, void **values,
                   void **extra) {
    CHECK(kernel == KERNEL && stream == STREAM && shared == 0 && extra == NULL);
    CHECK(gx == 2 && gy == 1 && gz == 1 && bx == 32 && by == 1 && bz == 1);
    address source = *(address *)values[0], target = *(address *)values[1];
    CHECK(current && inside(source, 160) && inside(target, 160));
    if (!capturing) return twice(source, target);
    captured[count].source = source;
    captured[count++].target = target;
    return 0;
}
int cuStreamBeginCapture(handle stream, int mode) {
    CHECK(stream == STREAM && mode == 1);
    capturing = 1;
    return count = 0;
}
int cuStreamEndCapture(handle stream, handle *graph) {
    CHECK(stream == STREAM && capturing);
    capturing = 0;
    graphs++;
    *graph = GRAPH;
    return 0;
}
int cuGraphInstantiateWithFlags(handle *exec, handle graph, unsigned long long flags) {
    CHECK(graph == GRAPH && flags == 0);
    execs++;
    *exec = GRAPH_EXEC;
    return 0;
}
int cuGraphInstantiate(handle *exec, handle graph, unsigned long long flags) {
    return cuGraphInstantiateWithFlags(exec, graph, flags);
}
int cuGraphDestroy(handle graph) { CHECK(graph == GRAPH && graphs-- > 0); return 0; }
int cuGraphExecDestroy(handle exec) { CHECK(exec == GRAPH_EXEC && execs-- > 0); return 0; }
int cuGraphLaunch(handle exec, handle stream) {
    CHECK(exec == GRAPH_EXEC && stream == STREAM);
    for (int i = 0; i < count; i++) twice(captured[i].source, captured[i].target);
    return 0;
}
int cuEventCreate(handle *event, unsigned flags) { *event = EVENT; events++; return flags; }
int cuEventRecord(handle event, handle stream) {
    CHECK(event == EVENT && stream == STREAM);
    return 0;
}
int cuEventSynchronize(handle event) { CHECK(event == EVENT); return 0; }
int cuEventElapsedTime(float *time, handle from, handle to) {
    CHECK(from == EVENT && to == EVENT);
    *time = 1.5f;
    return 0;
}
int cuEventDestroy(handle event) { CHECK(event == EVENT && events-- > 0); return 0; }
int cuPointerGetAttribute(void *value, int which, address place) {
    CHECK(which == 9);
    *(int *)value = 0;
    return !inside(place, 1);
}
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                        int *status) {
    Dl_info here;
    dladdr((void *)cuInit, &here);
    *function = dlsym(dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD), name);
    if (status) *status = *function == NULL;
    return *function ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

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
int cuCtxPushCurrent(handle context) { CHECK(context == CONTEXT); return 0; }
int cuCtxPopCurrent(handle *context) { *context = CONTEXT; return 0; }
int cuStreamCreate(handle *stream, unsigned flags) { *stream = STREAM; return flags != 1; }
int cuStreamSynchronize(handle stream) { CHECK(stream == STREAM); return 0; }
int cuMemAlloc(address *place, size_t size) {
    *place = (address)aligned_alloc(512, size);
    return 0;
}
int cuMemFree(address place) { free((void *)place); return 0; }
int cuMemGetInfo(size_t *left, size_t *total) { *left = 100; *total = 200; return 0; }
int cuMemcpyHtoDAsync(address to, const void *from, size_t size, handle stream) {
    CHECK(stream == STREAM);
    memcpy((void *)to, from, size);
    return 0;
}
int cuMemcpyDtoHAsync(void *to, address from, size_t size, handle stream) {
    CHECK(stream == STREAM);
    memcpy(to, (void *)from, size);
    return 0;
}
int cuMemcpyDtoDAsync(address to, address from, size_t size, handle stream) {
    CHECK(stream == STREAM);
    memcpy((void *)to, (void *)from, size);
    return 0;
}
int cuModuleLoadDataEx(handle *module, const char *text, unsigned options, int *names,
                       void **values) {
    CHECK(options == 2 && names[0] == 5 && names[1] == 6 && (uintptr_t)values[1] == 2000);
    *module = MODULE;
    if (!strstr(text, "BROKEN")) return 0;
    strcpy(values[0], "ptxas fatal: it is\nbroken");
    return 218;
}
int cuModuleUnload(handle module) { CHECK(module == MODULE); return 0; }
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
    *graph = GRAPH;
    return 0;
}
int cuGraphInstantiateWithFlags(handle *exec, handle graph, unsigned long long flags) {
    CHECK(graph == GRAPH && flags == 0);
    *exec = GRAPH_EXEC;
    return 0;
}
int cuGraphInstantiate(handle *exec, handle graph, unsigned long long flags) {
    return cuGraphInstantiateWithFlags(exec, graph, flags);
}
int cuGraphDestroy(handle graph) { CHECK(graph == GRAPH); return 0; }
int cuGraphExecDestroy(handle exec) { CHECK(exec == GRAPH_EXEC); return 0; }
int cuGraphLaunch(handle exec, handle stream) {
    CHECK(exec == GRAPH_EXEC && stream == STREAM);
    for (int i = 0; i < count; i++) twice(captured[i].source, captured[i].target);
    return 0;
}
int cuEventCreate(handle *event, unsigned flags) { *event = EVENT; return flags; }
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
int cuEventDestroy(handle event) { CHECK(event == EVENT); return 0; }
int cuPointerGetAttribute(void *value, int which, address place) {
    CHECK(which == 9);
    *(int *)value = 0;
    return place == 0;
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

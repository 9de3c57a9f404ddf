// Calls kernels for a process on another processor: EmulatedKernels in emulated_kernels.py.
//
// Each request has the name of a function, its arguments, an image of the memory that they lead to, and the places of the
// pointers in it. Pointers are offsets in the image, or -1 for null. The answer is the function's result and the image.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

extern "C" {
long cocoa_layout(const char*);
void cocoa_linear(void*, void*, long, long, void*, long, int);
void cocoa_unpack(long, void*, long, void*, long, void*, int);
void cocoa_next_tokens(void*, long, long, long, long, void*, int);
void cocoa_attend(void*, long, long, void*, void*, long, void*, long, void*, long, long, long, long, long, float, long,
                  int);
void cocoa_layers(void*, void*, long, void*, void*, void*, void*, long, void*, long, void*, long, int);
void cocoa_move(void*, void*, long, long, long, long, void*, long, long);
}

static char* image;

static void take(void* to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) exit(0);
}

template <typename T>
static T argument(int64_t given) {
    if constexpr (std::is_pointer_v<T>) return given < 0 ? nullptr : T(image + given);
    if constexpr (std::is_same_v<T, float>) {
        double value;
        memcpy(&value, &given, sizeof value);
        return float(value);
    } else
        return T(given);
}

template <typename... A, size_t... N>
static void call(void (*function)(A...), const int64_t* given, std::index_sequence<N...>) {
    function(argument<A>(given[N])...);
}

template <typename... A>
static void call(void (*function)(A...), const int64_t* given) {
    call(function, given, std::index_sequence_for<A...>{});
}

int main() {
    for (;;) {
        struct {
            char name[32];
            int64_t arguments, pointers, bytes;
        } request;
        take(&request, sizeof request);
        std::vector<int64_t> given(request.arguments), pointers(2 * request.pointers);
        take(given.data(), given.size() * sizeof(int64_t));
        take(pointers.data(), pointers.size() * sizeof(int64_t));
        image = static_cast<char*>(aligned_alloc(64, (request.bytes + 63) / 64 * 64 + 64));
        take(image, request.bytes);
        for (int64_t n = 0; n < request.pointers; n++) {
            char* const target = image + pointers[2 * n + 1];
            memcpy(image + pointers[2 * n], &target, sizeof target);
        }
        int64_t result = 0;
#define KERNEL(kernel) \
    if (!strcmp(request.name, #kernel)) call(kernel, given.data());
        KERNEL(cocoa_linear)
        KERNEL(cocoa_unpack)
        KERNEL(cocoa_next_tokens)
        KERNEL(cocoa_attend)
        KERNEL(cocoa_layers)
        KERNEL(cocoa_move)
        if (!strcmp(request.name, "cocoa_layout")) result = cocoa_layout(image + given[0]);
        fwrite(&result, sizeof result, 1, stdout);
        fwrite(image, 1, request.bytes, stdout);
        fflush(stdout);
        free(image);
    }
}

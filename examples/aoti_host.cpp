/* aoti_host: runs an AOTInductor package that uses opaq's operators, in a process without Python.
 *
 *     aoti_host <libopaq_torch.so> <package.pt2> <input> <columns> <folder>
 *
 * <input> is a file of float32, rows of <columns>. Each result is printed as dtype and shape, and its bytes go
 * to <folder>/result<i>.
 *
 * In C++, because LibTorch's loader of packages is a C++ class without a counterpart in the C ABI: the proxy
 * executor, which calls operators of a package, can be created from C++ only. opaq itself is one dlopen, which
 * registers the operators, so a host needs no header of opaq and is not linked with it. Compiled against
 * PyTorch's headers with -ltorch -ltorch_cpu -lc10 -ldl; tests/python/test_torch_aoti.py does it. */
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

/* Registers the operators; prints the reason if that failed. The library is never closed, because it contains
 * them. */
static bool load_operators(const char *path) {
    void *library = dlopen(path, RTLD_NOW);
    if (library == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        return false;
    }
    void *symbol = dlsym(library, "opaq_torch_status");
    const char *reason =
        symbol == nullptr ? "no libopaq_torch.so" : reinterpret_cast<const char *(*)()>(symbol)();
    if (reason != nullptr) {
        std::fprintf(stderr, "%s: %s\n", path, reason);
    }
    return reason == nullptr;
}

static at::Tensor read_rows(const char *path, int64_t columns) {
    std::ifstream file(path, std::ios::binary);
    TORCH_CHECK(file && columns > 0, path, " cannot be read as rows of ", columns);
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const int64_t rows = static_cast<int64_t>(bytes.size() / sizeof(float)) / columns;
    return at::from_blob(bytes.data(), {rows, columns}, at::kFloat).clone();
}

static void write_result(const std::string &path, const at::Tensor &result) {
    const at::Tensor dense = result.contiguous();
    std::ofstream file(path, std::ios::binary);
    file.write(static_cast<const char *>(dense.const_data_ptr()), static_cast<std::streamsize>(dense.nbytes()));
    TORCH_CHECK(file.good(), path, " cannot be written");
}

int main(int argc, char **argv) {
    if (argc != 6) {
        std::fprintf(stderr, "usage: %s <libopaq_torch.so> <package.pt2> <input> <columns> <folder>\n",
                     argv[0]);
        return 2;
    }
    if (!load_operators(argv[1])) {
        return 1;
    }
    try {
        const at::Tensor x = read_rows(argv[3], std::atoll(argv[4]));
        torch::inductor::AOTIModelPackageLoader package(argv[2]);
        const std::vector<at::Tensor> results = package.run({x});
        for (size_t i = 0; i < results.size(); ++i) {
            write_result(std::string(argv[5]) + "/result" + std::to_string(i), results[i]);
            std::printf("%s", c10::toString(results[i].scalar_type()));
            for (const int64_t size : results[i].sizes()) {
                std::printf(" %lld", static_cast<long long>(size));
            }
            std::printf("\n");
        }
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    std::printf("Python is %s this process\n",
                dlsym(RTLD_DEFAULT, "Py_IsInitialized") == nullptr ? "not in" : "in");
    return 0;
}

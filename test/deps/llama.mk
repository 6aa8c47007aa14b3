# Compiles llama-server from SRC and links it to the shared libraries in OUT.
# See llama.sh.

CPPFLAGS = -DLLAMA_SHARED -DGGML_SHARED -DGGML_BACKEND_SHARED -DLLAMA_SUBPROCESS \
	$(addprefix -I$(SRC)/,. common include ggml/include vendor vendor/hash tools/mtmd tools/server)
CFLAGS   = -O1 -w
CXXFLAGS = -O1 -w -std=c++17

# Everything but mtmd's command line and a wrapper that only prints a warning.
# The vendored HTTP library is already part of libllama-common.
sources = $(filter-out %/mtmd-cli.cpp %/deprecation-warning.cpp, \
	$(wildcard $(addprefix $(SRC)/,tools/server/*.cpp tools/mtmd/*.cpp tools/mtmd/models/*.cpp)) \
	$(addprefix $(SRC)/vendor/hash/,hash.cpp xxhash/xxhash.c sha1/sha1.c sha256/sha256.c))
objects = $(addsuffix .o,$(basename $(sources)))

$(OUT)/llama-server: $(objects)
	$(CXX) -o $@ $^ -Wl,-rpath,'$$ORIGIN' -pthread \
		$(wildcard $(addprefix $(OUT)/,libllama*.so libggml.*.so libggml-base.so))

# llama.cpp keeps sha1 in a C++ namespace although its name ends in .c.
$(SRC)/vendor/hash/sha1/sha1.o: $(SRC)/vendor/hash/sha1/sha1.c
	$(CXX) $(CPPFLAGS) $(CXXFLAGS) -x c++ -c -o $@ $<

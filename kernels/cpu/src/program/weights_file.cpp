// Packed weights in a file: matrix after matrix, each in whole cache lines, and then the screen.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "program.h"

namespace penstock {
namespace {

class File {
 public:
  File(const char* path, int flags) : path_(path), descriptor_(open(path, flags | O_CLOEXEC, 0600)) {
    if (descriptor_ < 0) fail();
  }
  ~File() { close(descriptor_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor() const { return descriptor_; }

  size_t size() const {
    struct stat facts;
    if (fstat(descriptor_, &facts) != 0) fail();
    return static_cast<size_t>(facts.st_size);
  }

  void write(const char* data, size_t bytes) const {
    while (bytes) {
      const ssize_t written = ::write(descriptor_, data, bytes);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) fail();
      data += written;
      bytes -= static_cast<size_t>(written);
    }
  }

 private:
  [[noreturn]] void fail() const { throw std::runtime_error(path_ + ": " + std::strerror(errno)); }

  const std::string path_;
  const int descriptor_;
};

}  // namespace

void Program::map_weights(const char* path) {
  if (!matrices_.empty()) throw std::invalid_argument("there are weights already");
  const File file(path, O_RDONLY);
  if (file.size() == 0) throw std::invalid_argument("a file without weights");
  weights_.take_from(file.descriptor(), file.size());
}

Matrix& Program::fillable(int index) {
  if (weights_.is_file()) throw std::invalid_argument("the weights lie in a file");
  return matrix(index);
}

int64_t Program::weight_bytes() const {
  int64_t bytes = 0;
  for (const Matrix& m : matrices_) bytes += m.bytes();
  return bytes;
}

void Program::seal() {
  if (weights_.is_file()) return;
  for (Matrix& m : matrices_)
    if (m.is_short()) m.short_code->seal(m);
}

int64_t Program::write_weights(const char* path) const {
  const File file(path, O_WRONLY | O_CREAT | O_TRUNC);
  int64_t total = 0;
  const auto write = [&](const char* weights, size_t bytes) {
    file.write(weights, Arena::whole_lines(bytes));
    total += static_cast<int64_t>(Arena::whole_lines(bytes));
  };
  for (const Matrix& m : matrices_) write(m.weights, static_cast<size_t>(m.bytes()));
  if (screen_) write(screen_->weights, screen_->bytes());
  return total;
}

}  // namespace penstock

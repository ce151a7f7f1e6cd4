// A CUDA device that does nothing: lets autograd run on fake 'cuda' tensors where torch finds no GPU.
//
// Nothing is registered, because registering CUDA hooks a second time ends the process on a CUDA build of torch. Instead
// the guard pointer in c10's registry and the vtable pointer of the object behind getCUDAHooks() are replaced, which works
// after `import torch` and on CPU and CUDA builds alike. It can't be undone: the process is for tracing only.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

thread_local DeviceIndex selected_device = 0;
DeviceIndex num_devices = 1;

Device device_at(DeviceIndex index) {
  return Device(DeviceType::CUDA, index < 0 ? selected_device : index);
}

Stream stream_of(Device device) {
  return Stream(Stream::DEFAULT, device_at(device.index()));
}

void select(DeviceIndex index) {
  if (index >= 0) {
    selected_device = index;
  }
}

DeviceIndex exchange(DeviceIndex index) {
  const DeviceIndex before = selected_device;
  select(index);
  return before;
}

struct NoOpGuard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override { return device_at(exchange(device.index())); }
  Device getDevice() const override { return device_at(selected_device); }
  void setDevice(Device device) const override { select(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { select(device.index()); }
  Stream getStream(Device device) const noexcept override { return stream_of(device); }
  Stream getDefaultStream(Device device) const override { return stream_of(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return stream_of(device); }
  Stream getNewStream(Device device, int) const override { return stream_of(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream_of(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

struct NoOpHooks final : public at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return selected_device; }
  void setCurrentDevice(DeviceIndex index) const override { select(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
};

void*& vtable_of(const at::CUDAHooksInterface& hooks) {
  return *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&hooks));
}

std::atomic<bool> installed{false};

}  // namespace

extern "C" {

int echo_guard_abi() { return 1; }

// 1: installed by this call; 0: it was there already.
int echo_guard_install(int devices) {
  static NoOpGuard* guard = new NoOpGuard();
  static NoOpHooks* hooks = new NoOpHooks();
  if (installed.exchange(true)) {
    return 0;
  }
  num_devices = static_cast<DeviceIndex>(devices);
  vtable_of(at::detail::getCUDAHooks()) = vtable_of(*hooks);
  c10::impl::device_guard_impl_registry[static_cast<std::size_t>(DeviceType::CUDA)].store(guard);
  return 1;
}
}
